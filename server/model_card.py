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
from engine.features.lora.files import AdapterRules
from engine.settings.own_kernels import kernels_here
from engine.settings.sections import ServerSection
from server.adapters import ServedAdapter, adapters_below

if TYPE_CHECKING:
    from engine.control.system import System


TOY_PARAMETERS: Final = 50_000_000


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served model.

    name: what requests put into ``model``; matched exactly.
    max_model_len: longest prompt plus output in tokens.
    created: Unix time shown by /v1/models.
    chat_defaults: the checkpoint's own temperature, top_p, top_k and repetition_penalty, for requests
        that leave them out.
    tool_parser, reasoning_parser: the names of what reads its function calls and its thoughts.
    template_variables: what clients may set in its chat template.  template_roles: the roles that it knows by name.
    use: what requests may ask of the model.
    fingerprint: hash of the weights and of what they are computed with; empty if that is not known.
    about: what people should know of it beside its name; empty if there is nothing.
    adapter_rules: which adapters it takes; None for none.  adapters: those that are served at start, by their names.
    features: what the engine's features let extensions know, by their names.
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
    adapter_rules: AdapterRules | None = None
    adapters: dict[str, ServedAdapter] = {}
    features: dict[str, str] = {}

    @classmethod
    def of(cls, system: "System", server: ServerSection) -> "ModelCard":
        """Returns the card of what an engine serves, created now."""
        return cls(
            name=system.model_name,
            max_model_len=system.max_len,
            vocab_size=system.spec.vocab_size,
            created=int(time.time()),
            chat_defaults=system.sampling_defaults,
            tool_parser=system.codec.formats.tool_parser,
            reasoning_parser=system.codec.formats.reasoning_parser,
            template_variables=server.allowed_template_variables,
            use=system.spec.use,
            template_roles=system.codec.roles,
            fingerprint=_fingerprint(system),
            about=about(system.num_parameters),
            adapter_rules=system.adapter_rules,
            features={name: one.about for name, one in system.features.items() if one.about},
            adapters={} if system.adapter_rules is None else adapters_below(system.adapter_rules, system.model_name),
        )

    def after_changes(self, system: "System") -> "ModelCard":
        """Returns the card of the same name, with the same adapters, when the engine's settings have changed."""
        return msgspec.structs.replace(
            self,
            chat_defaults=system.sampling_defaults,
            fingerprint=_fingerprint(system),
            about=about(system.num_parameters),
        )


def about(num_parameters: int) -> str:
    """Calls a very small model a toy, so that its answers are not taken for more; empty for others, and where 0 is
    known."""
    return f"a toy of {num_parameters / 1e6:.1f} million parameters" if 0 < num_parameters < TOY_PARAMETERS else ""


def _fingerprint(system: "System") -> str:
    """The fingerprint of the weights, the kernels by the names that are configured, whether a compiler makes
    callboard's own
    here, torch's version and the numerics.

    What pages keep is part of those: rounded keys and values give other logits."""
    config, model = system.config, system.config.model
    weights = fingerprint(system.spec, model.load_format)
    kernels = (config.plugins.linear, config.plugins.attention, config.graphs.mode)
    made = (kernels_here(), metadata.version("torch"))
    numerics = (model.numerics, model.dtype, model.quantization, config.kv.dtype)
    ranks = (config.device.kind, config.device.tensor_parallel)
    return hashlib.sha256(msgspec.json.encode((weights, kernels, made, numerics, ranks))).hexdigest()[:16]
