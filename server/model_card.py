"""Facts about the served model that the API needs.

Owns: the name clients ask for and what the checkpoint says about its use.  Does not know: weights, tokenizers, HTTP.
"""

import hashlib
import time
from importlib import metadata
from typing import TYPE_CHECKING, Final

import msgspec

from engine.checkpoints.fingerprint import fingerprint
from engine.checkpoints.use import GENERATING, ModelUse
from engine.plugins.kinds import ATTENTION, LINEAR, named
from engine.settings.own_kernels import kernels_here
from engine.settings.sections import ServerSection

if TYPE_CHECKING:
    from engine.control.engine_spec import EngineSpec
    from engine.control.system import System


ARITHMETIC = 2  # raised when kernels of the same names give other results
TOY_PARAMETERS: Final = 50_000_000
ANY_MODEL: Final = ("default", "default/not-specified")  # sent by clients of servers that look at no name


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served model.

    name: what requests put into ``model``; matched exactly, but for the names of ``ANY_MODEL``.
    max_model_len: longest prompt plus output in tokens.
    created: Unix time shown by /v1/models.
    chat_defaults: the checkpoint's own temperature, top_p, top_k and repetition_penalty, for requests
        that leave them out.
    tool_parser, reasoning_parser: the names of what reads its function calls and its thoughts.
    template_variables: what clients may set in its chat template.  template_roles: the roles that it knows by name.
    use: what requests may ask of the model.
    fingerprint: hash of the weights and of what they are computed with; empty if that is not known.
    about: what people should know of it beside its name; empty if there is nothing.
    parts: what extensions of the server know of it, by their names.
    """

    name: str
    max_model_len: int
    vocab_size: int
    created: int
    chat_defaults: dict[str, float | int] = {}
    tool_parser: str = "hermes"
    reasoning_parser: str = "none"
    template_variables: tuple[str, ...] = ()
    use: ModelUse = GENERATING
    template_roles: tuple[str, ...] = ()
    fingerprint: str = ""
    about: str = ""
    parts: dict[str, bytes] = {}

    @classmethod
    def of(cls, system: "System", server: ServerSection, parts: dict[str, bytes] | None = None) -> "ModelCard":
        """Returns the card of what an engine serves, created now.  parts: see ``described``."""
        engine, formats = system.engine, system.engine.codec.formats
        return cls(
            name=engine.model_name,
            max_model_len=engine.max_len,
            vocab_size=engine.model.vocab_size,
            created=int(time.time()),
            chat_defaults=engine.sampling_defaults,
            tool_parser=formats.tool_parser,
            reasoning_parser=formats.reasoning_parser,
            template_variables=server.allowed_template_variables,
            use=engine.model.use,
            template_roles=engine.codec.roles,
            fingerprint=_fingerprint(engine),
            about=about(engine.num_parameters),
            parts={} if parts is None else parts,
        )

    def after_changes(self, engine: "EngineSpec") -> "ModelCard":
        """Returns the card of the same name, with the same parts, when the engine's settings have changed."""
        return msgspec.structs.replace(
            self,
            chat_defaults=engine.sampling_defaults,
            fingerprint=_fingerprint(engine),
            about=about(engine.num_parameters),
        )


def about(num_parameters: int) -> str:
    """Calls a very small model a toy, so that its answers are not taken for more; empty for others, and where 0 is
    known."""
    return f"a toy of {num_parameters / 1e6:.1f} million parameters" if 0 < num_parameters < TOY_PARAMETERS else ""


def _fingerprint(engine: "EngineSpec") -> str:
    """The fingerprint of the weights, the kernels by the names that are configured, whether callboard's own are here,
    torch's version and the numerics.

    What pages keep is part of those: rounded keys and values give other logits."""
    config, model = engine.config, engine.config.model
    weights = fingerprint(engine.model, model.load_format)
    kernels = (named(config.plugins, LINEAR), named(config.plugins, ATTENTION), config.graphs.mode)
    made = (ARITHMETIC, kernels_here(), metadata.version("torch"))
    numerics = (model.numerics, model.dtype, model.quantization, config.kv.dtype)
    ranks = (config.device.kind, config.device.tensor_parallel)
    return hashlib.sha256(msgspec.json.encode((weights, kernels, made, numerics, ranks))).hexdigest()[:16]
