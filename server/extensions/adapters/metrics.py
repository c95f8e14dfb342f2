"""The sample of adapters in /metrics, which the Gateway API's endpoint picker asks of model servers."""

import time
from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from engine.actors.snapshot import Snapshot
from engine.features.lora.files import NAME
from server.operators.metrics import VLLM
from server.variant import ServedVariant


class AdapterSamples:
    """The sample for one model.  served: the adapters, by their names."""

    def __init__(self, model: str, served: Mapping[str, ServedVariant]) -> None:
        self._model = model
        self._served = served

    def collect(self, seen: Snapshot) -> Iterator[Metric]:
        """Return the sample; none if no adapters are served."""
        gauges = seen.gauges
        if num_slots := gauges.of_features.get("num_adapter_slots"):
            labels = {
                "model_name": self._model,
                "engine": "0",
                "max_lora": str(num_slots),
                "running_lora_adapters": self._named(gauges.running_adapters),
                "waiting_lora_adapters": self._named(gauges.waiting_adapters),
            }
            help_text = "Adapters of requests in and out of the batch; the value is the Unix time."
            family = GaugeMetricFamily(f"{VLLM}lora_requests_info", help_text, labels=[*labels])
            family.add_metric([*labels.values()], time.time())
            yield family

    def _named(self, digests: frozenset[str]) -> str:
        return ",".join(sorted(name for name, one in self._served.items() if one.parts[NAME].digest in digests))
