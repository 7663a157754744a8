"""`GET /v1/models`."""

from services.gateway.answers import Model, ModelList
from services.gateway.front import Front


def served_model(front: Front) -> Model:
    """Return the one served model."""
    served = front.served
    return Model(id=served.model, created=served.created, max_model_len=served.limits.max_model_len)


def model_list(front: Front) -> ModelList:
    """Return the list of served models."""
    return ModelList(data=[served_model(front)])
