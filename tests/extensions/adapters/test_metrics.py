"""The sample of adapters in /metrics."""

from engine.features.lora.files import Adapter
from tests.extensions.adapters.cards import card_with
from tests.server.live_server import MODEL, LiveServer
from tests.server.test_metrics import scrape


def test_an_endpoint_picker_reads_the_adapters_by_their_names() -> None:
    served = {name: Adapter(digest, "/") for name, digest in (("a", "1"), ("b", "2"), ("c", "2"))}
    with LiveServer(card=card_with(served)) as live:
        assert not [name for name, _ in scrape(live) if name == "vllm:lora_requests_info"]
        live.monitor.changed = {
            "of_features": {"num_adapter_slots": 8},
            "running_adapters": frozenset("2"),
            "waiting_adapters": frozenset({"1", "unloaded"}),
        }
        samples = {name: dict(labels) for name, labels in scrape(live)}
    labels = {"model_name": MODEL, "engine": "0"}
    assert samples["vllm:lora_requests_info"] == {
        **labels, "max_lora": "8", "running_lora_adapters": "b,c", "waiting_lora_adapters": "a",
    }  # fmt: skip
