"""Cards of a server that has adapters."""

import msgspec

from engine.features.lora.files import Adapter, AdapterRules
from server.extensions.adapters.extension import PART, Described
from server.model_card import ModelCard
from server.variant import ServedVariant
from tests.server.live_server import CARD


def card_with(adapters: dict[str, Adapter], rules: AdapterRules | None = None) -> ModelCard:
    served = {name: ServedVariant(created=0, parts=one.parts) for name, one in adapters.items()}
    described = Described(rules or AdapterRules("/", 4, {}), served)
    return msgspec.structs.replace(CARD, parts={PART: msgspec.msgpack.encode(described)})
