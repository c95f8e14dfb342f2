"""The conformance kit for logits processors: one call checks a processor, and lists every case that fails.

    from callboard.plugins.testing import check_logits_processor
    check_logits_processor(NoRepeatNgram, [{"size": 1}, {"size": 3}])

Legend: n rows · L tokens of the longest row · V vocabulary
Owns: random rows.  Does not know: the purpose of a processor.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy.typing as npt
import torch
from torch import Tensor

from engine.layers.upload import upload
from engine.plugins.proof.findings import Findings
from engine.plugins.testing.promises import watch_memory, with_clocks
from engine.text.processors import LogitsProcessor, LogitsRows

VOCAB_SIZE = 64
LENGTHS = (1, 2, 7, 30, 30, 64)
NUM_STEPS = 60
Tables = Sequence[Mapping[str, Any]]


def check_logits_processor(make: Callable[[], LogitsProcessor], tables: Tables, *, device: str = "cpu") -> None:
    """Process random rows, together and alone, and repeatedly.  Raises ConformanceError with all that fails.

    make: builds a new one each time, as the plugin's hook does with a vocabulary of 64.  tables: parameters as in
    requests, at least one.  On 'cuda', waiting for the device is a failure too."""
    findings = Findings("logits processor")
    findings.timed("parameters", lambda: _check_params(make(), tables))
    if findings.failures:
        findings.conclude()
    kind = make().params
    rows = _Rows([msgspec.convert(dict(table), kind) for table in tables], torch.device(device))

    def timed() -> LogitsProcessor:
        return with_clocks(make(), "process")

    findings.timed("rows together and alone", lambda: rows.check_alone(timed(), timed()))
    findings.timed("rows in another order, with other tokens after their ends", lambda: rows.check_order(timed()))
    findings.timed("the same again", lambda: rows.check_again(timed(), timed()))
    findings.timed("inputs stay unchanged", lambda: rows.check_inputs(timed()))
    findings.timed("memory", lambda: rows.check_memory(make()))
    if device == "cuda":
        findings.timed("it does not wait", lambda: rows.check_waits(timed()))
    findings.conclude()


def _check_params(processor: LogitsProcessor, tables: Tables) -> None:
    assert isinstance(processor, LogitsProcessor), f"{processor!r} lacks params or process"
    assert tables, "check it with parameters as in requests, at least one table"
    kind = processor.params
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    assert is_struct, f"params is {kind!r}, not a msgspec struct"
    for table in tables:
        msgspec.convert(dict(table), kind)
    try:
        msgspec.convert({**tables[0], "no such field": 1}, kind)
    except msgspec.ValidationError:
        return
    raise AssertionError("a field that params does not have is not refused; derive it from callboard.plugins.Options")


class _Rows:
    """Rows of each length for each table."""

    def __init__(self, params: Sequence[msgspec.Struct], device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self._device = device
        self._params = [one for one in params for _ in LENGTHS]
        self._lengths = [length for _ in params for length in LENGTHS]
        count = len(self._params)
        # Few different tokens, so that many repeat.
        self._tokens_nL = torch.randint(0, 5, (count, max(LENGTHS)), generator=generator, dtype=torch.int32).to(device)
        self._logits_nV = torch.randn((count, VOCAB_SIZE), generator=generator).to(device)
        self._all = list(range(count))

    def _run(self, processor: LogitsProcessor, at: list[int], tokens_nL: Tensor | None = None) -> Tensor:
        lengths = torch.tensor([self._lengths[index] for index in at])
        tokens_nL = self._tokens_nL if tokens_nL is None else tokens_nL
        logits_nV = self._logits_nV[at]
        expected = (logits_nV.shape, logits_nV.dtype, logits_nV.device)
        processed_nV = processor.process(
            logits_nV,
            LogitsRows(
                params=tuple(self._params[index] for index in at),
                token_ids_nL=tokens_nL[at, : int(lengths.max())],
                lengths_n=lengths.to(self._device),
                num_prompt_n=lengths.div(2, rounding_mode="floor").clamp(min=1).to(self._device),
                host_lengths_n=lengths.numpy(),
                upload=self._upload,
            ),
        )
        assert isinstance(processed_nV, Tensor), f"process returned {processed_nV!r:.100}, not logits"
        seen = (processed_nV.shape, processed_nV.dtype, processed_nV.device)
        assert seen == expected, f"process returned {seen}, not {expected}"
        return processed_nV.clone()

    def _upload(self, values: npt.NDArray[Any]) -> Tensor:
        return upload((values,), self._device)[0]

    def _same(self, seen_nV: Tensor, expected_nV: Tensor, at: list[int], what: str) -> None:
        for row, index in enumerate(at):
            assert torch.equal(seen_nV[row].nan_to_num(1e30), expected_nV[row].nan_to_num(1e30)), (
                f"a row of {self._lengths[index]} tokens with {self._params[index]} gets other logits {what}"
            )

    def check_alone(self, together: LogitsProcessor, alone: LogitsProcessor) -> None:
        """Check that a row's result does not depend on the rest of the step."""
        processed_nV = self._run(together, self._all)
        for index in self._all:
            self._same(self._run(alone, [index]), processed_nV[[index]], [index], "when it is alone in a step")

    def check_order(self, processor: LogitsProcessor) -> None:
        """Check that neither a row's place counts, nor the old content of its line of tokens."""
        at = self._all[::-1]
        processed_nV = self._run(processor, self._all)[at]
        tokens_nL = self._tokens_nL.clone()
        for index, length in enumerate(self._lengths):
            tokens_nL[index, length:] = 3
        self._same(
            self._run(processor, at, tokens_nL), processed_nV, at, "with other tokens after its end or in another place"
        )

    def check_again(self, first: LogitsProcessor, second: LogitsProcessor) -> None:
        """Check that a request that is resumed after a loss gets the same result."""
        processed_nV = self._run(first, self._all)
        for processor in (first, second):
            self._same(self._run(processor, self._all), processed_nV, self._all, "when it is processed again")

    def check_inputs(self, processor: LogitsProcessor) -> None:
        """Check that tokens, which all processors share, are not changed."""
        before_nL = self._tokens_nL.clone()
        self._run(processor, self._all, self._tokens_nL)
        assert torch.equal(before_nL, self._tokens_nL), "it changes the tokens"

    def check_memory(self, processor: LogitsProcessor) -> None:
        """Check that no memory is kept of a step."""
        watch_memory(lambda _: self._run(processor, self._all), "a step that it processes", NUM_STEPS)

    def check_waits(self, processor: LogitsProcessor) -> None:
        """Check that the host does not wait for the device."""
        self._run(processor, self._all)  # the host may wait for compilation
        length = max(self._lengths)
        at = [index for index in self._all if self._lengths[index] == length]
        count = torch.full((len(at),), length, device=self._device)
        rows = LogitsRows(
            params=tuple(self._params[index] for index in at),
            token_ids_nL=self._tokens_nL[at],
            lengths_n=count,
            num_prompt_n=count // 2,
            host_lengths_n=torch.full((len(at),), length).numpy(),
            upload=self._upload,
        )
        process = partial(processor.process, self._logits_nV[at], rows)
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            process()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
