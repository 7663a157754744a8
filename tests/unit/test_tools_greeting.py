"""The first request to a fresh deployment."""

import httpx
import pytest

from shared.errors import ResourceMissing
from tools.greeting import _wait_ready


def test_a_deployment_that_answers_nothing_is_told_with_what_to_set() -> None:
    """Guards a start on a busy machine that fails with nothing to do about it."""
    hung = httpx.MockTransport(lambda _: httpx.Response(503, text="no answer within 5 s"))
    with (
        httpx.Client(transport=hung, base_url="http://x") as client,
        pytest.raises(ResourceMissing, match=r"within 0 s \(`router\.hung_after`.*no answer w"),
    ):
        _wait_ready(client, 0.0)
