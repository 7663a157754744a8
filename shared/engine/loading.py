"""Load a transformers model with our attention: private config, named dtype, enough memory."""

import warnings
from pathlib import Path
from typing import Any, TypeAlias

import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from shared.engine.attention import ATTENTION_NAME, register
from shared.engine.dtypes import LOADED_AS
from shared.engine.weights import check_weights, require_memory
from shared.errors import BadConfig, UnsupportedModel
from shared.precision import Precision

HfModel: TypeAlias = Any
"""A transformers causal language model; the library is not typed."""


def load_model(model_dir: Path, precision: Precision) -> HfModel:
    """Load the causal language model of a safetensors directory onto the CPU, ready to run.

    The config is read anew for every model: transformers keeps the attention's name in it.

    Raises:
        ResourceMissing: a file is missing or truncated, or memory is too small.
        UnsupportedModel: transformers cannot build the model or refuses our attention.
    """
    dtype = LOADED_AS[precision]
    parameters = check_weights(model_dir)
    require_memory(model_dir, parameters * dtype.itemsize)
    register()
    transformers.utils.logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=False
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(transformers|torch|safetensors)(\.|$)")
            model, report = AutoModelForCausalLM.from_pretrained(
                model_dir,
                config=config,
                attn_implementation=ATTENTION_NAME,
                # One expert after the other: a token's sums do not depend on its neighbours.
                experts_implementation="eager",
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except KeyError as error:
        if error.args == (ATTENTION_NAME,):
            raise UnsupportedModel(
                f"{model_dir.name}: this architecture has attention of its own and does not use "
                "transformers' attention interface"
            ) from error
        raise UnsupportedModel(f"{model_dir.name}: cannot be loaded: {error!r}") from error
    except (ValueError, TypeError, ImportError, OSError, RuntimeError, AttributeError) as error:
        raise UnsupportedModel(f"{model_dir.name}: cannot be loaded: {error}") from error
    if report["missing_keys"]:
        raise UnsupportedModel(
            f"{model_dir.name}: the config asks for weights that the files do not hold: "
            f"{', '.join(sorted(report['missing_keys'])[:3])}"
        )
    return model.eval().requires_grad_(False)


def text_config(model: HfModel) -> Any:  # noqa: ANN401
    """Return the config of the language model proper."""
    return model.config.get_text_config(decoder=True)


def resolve_max_model_len(model: HfModel, asked: int | None) -> int:
    """Return the longest prompt + output in tokens.

    Raises:
        BadConfig: more is asked than the model has positions, or the model does not say.
    """
    limit = getattr(text_config(model), "max_position_embeddings", None)
    if limit is None:
        if asked is None:
            raise BadConfig("the model does not say how long it may run: set `model.max_model_len`")
        return asked
    if asked is not None and asked > limit:
        raise BadConfig(
            f"`model.max_model_len` is {asked}, but the model's positions end at {limit}"
        )
    return int(asked or limit)


def end_token_ids(model: HfModel) -> tuple[int, ...]:
    """Return the end tokens that generation config or config name, in ascending order."""
    for source in (getattr(model, "generation_config", None), text_config(model)):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(sorted({int(i) for i in (ids if isinstance(ids, list) else [ids])}))
    return ()
