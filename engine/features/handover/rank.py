"""Hand-overs on a rank: pages that are copied out of the pool for other engines, and pages that land in it.

Owns: the carrier, the thread that copies pages out, the lock between the event loop and the device thread.
Does not know: which pages are lent, what is sent when.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import msgspec
import numpy as np
import torch

from engine.actors.runner import Answer
from engine.execution.features import RankContext, RankFeature
from engine.execution.needs import Needs
from engine.execution.page_contents import page_namespace
from engine.features.handover.borrower import Borrower
from engine.features.handover.desk import Desk, WantedBytes
from engine.features.handover.lender import Lender
from engine.features.handover.messages import (
    NAME,
    Open,
    Report,
    Wire,
    frame_of,
    landings_of,
    order_of,
    report_message,
    state_number,
    wire_of,
)
from engine.features.handover.sides import Sides
from engine.features.handover.terms import terms_of
from engine.layers.kv_pool import KVPool
from engine.messages import FeatureRequest, Step
from engine.plugins.hookspecs import TransferContext
from engine.plugins.transfer.kind import TRANSFER
from engine.plugins.transfer.options import CarrierOptions
from engine.plugins.transfer.transfer import PageCarrier

log = logging.getLogger(__name__)

MESSAGE_BYTES: Final = 32 << 20  # a claim has the tokens of a prompt


class HandoverRank(RankFeature):
    """The hand-overs of one rank, once ``build`` has opened the carrier."""

    order = 10  # a landing may go into a page that the same step moves to the host, and a state into a slot

    def __init__(self, context: RankContext, options: CarrierOptions) -> None:
        self._context = context
        self._options = options
        self._rank = context.comm.rank
        self._states = context.states
        self._changing = threading.Lock()
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="lent")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sides: Sides | None = None
        self._transfer: PageCarrier

    def build(self, pool: KVPool, pools: Sequence[KVPool], needs: Needs) -> None:
        """Open the carrier.  Raises PluginError."""
        context, options = self._context, self._options
        self._pages = pool.by_page
        self._page_bytes = pool.by_page[0].nbytes
        self._model = page_namespace(context, pool)
        transfer_context = TransferContext(
            receive=self._received,
            most_bytes=MESSAGE_BYTES + options.group_kb * 1024 + self._page_bytes,
            rank=self._rank,
            group_bytes=max(options.group_kb * 1024, self._page_bytes),
        )
        self._transfer = context.plugins.build(context.plugins.names[TRANSFER], transfer_context, PageCarrier)

    # ---- the event loop ---------------------------------------------------------------------

    def receive(self, message: FeatureRequest, answer: Answer) -> bool:
        """Take an order of the planner; the first one opens both sides."""
        if message.feature != NAME:
            return False
        order = order_of(message)
        with self._changing:
            if isinstance(order, Open):
                self._open(answer)
            elif self._sides is not None:
                self._sides.take(order)
        return True

    def _open(self, answer: Answer) -> None:
        options = self._options
        loop = self._loop = asyncio.get_running_loop()

        def report(content: Report) -> None:
            answer(report_message(self._rank, content))

        desk = Desk(
            address=self._transfer.address,
            model=self._model,
            page_bytes=self._page_bytes,
            state_bytes=self._states.data[0].nbytes if self._states is not None else 0,
            send=self._send,
            report=report,
            later=lambda seconds, call: loop.call_later(seconds, self._call, call),
            read=self._read,
        )
        lender = Lender(desk, options.lease_s, options.group_kb * 1024)
        borrower = Borrower(desk, options.timeout_s, options.buffer_mb << 20)
        self._sides = Sides(lender, borrower, self._find)

    def _call(self, call: Callable[[], None]) -> None:
        with self._changing:
            call()

    def _find(self, peer: str) -> str:
        """Return the address of a peer; '' for one that is not known."""
        try:
            return self._transfer.locate(peer)
        except ValueError as error:
            log.warning("rank %d: %s", self._rank, error)
            return ""

    def _send(self, address: str, message: Wire, payload: bytes) -> None:
        if address:
            self._transfer.send(address, frame_of(message), payload)

    def _read(self, wanted: WantedBytes, done: Callable[[bytes], None]) -> None:
        """Copy pages and a state out on a thread: they are locked, so no step changes them meanwhile."""
        loop = self._loop
        assert loop is not None

        def copy() -> None:
            content = b""
            try:
                content = self._content(wanted)
            except Exception:  # the other engine computes what does not come
                log.exception("rank %d: pages that are lent could not be copied out", self._rank)
            with_loop(loop, partial(self._call, partial(done, content)))

        self._copies.submit(copy)

    @torch.inference_mode()
    def _content(self, wanted: WantedBytes) -> bytes:
        index = torch.from_numpy(np.frombuffer(wanted.pages, dtype=np.int32).astype(np.int64)).to(self._pages.device)
        found = self._pages.index_select(0, index).reshape(-1).view(torch.uint8)
        content: bytes = found.cpu().numpy().tobytes()
        if wanted.end > wanted.first:
            assert self._states is not None, "a state is lent of a model without any"
            assert self._states.slot is not None, "a state is lent, and no slot keeps one"
            state = self._states.slot(wanted.slot).view(torch.uint8)[wanted.first : wanted.end]
            content += state.cpu().numpy().tobytes()
        return content

    def _received(self, frame: bytes, payload: bytes) -> None:
        """Take a message of another engine, on any thread."""
        if (loop := self._loop) is None:
            return
        try:
            message = wire_of(frame)
        except msgspec.MsgspecError as error:
            log.warning("rank %d: a message of another engine was refused: %s", self._rank, error)
            return
        with_loop(loop, partial(self._pass_on, message, payload))

    def _pass_on(self, message: Wire, payload: bytes) -> None:
        with self._changing:
            if self._sides is not None:
                self._sides.receive(message, payload)

    # ---- the device thread ------------------------------------------------------------------

    def apply(self, step: Step) -> Step:
        """Copy pages that have come into the pool."""
        for landing in landings_of(step):
            pages = np.frombuffer(landing.pages, dtype=np.int32).tolist()
            assert self._sides is not None, "pages land on a rank that was never opened"
            with self._changing:
                contents, state = self._sides.borrower.land(landing.number, landing.first, len(pages))
            if landing.with_state:
                assert self._states is not None, "a state lands in a model without any"
                arrived = torch.frombuffer(bytearray(state), dtype=torch.uint8).view(self._states.data.dtype)
                self._states.arrived[state_number(landing.number)] = arrived
            for page, content in zip(pages, contents, strict=True):
                into = self._pages[page]
                into.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8).view(into.dtype).view(into.shape))
        return step

    def close(self) -> None:
        """Close the carrier; no step follows."""
        self._sides = None
        self._transfer.close()
        self._copies.shutdown(cancel_futures=True)

    def leave(self) -> None:
        """End without a wait for the thread."""
        self._sides = None
        self._transfer.close()
        self._copies.shutdown(wait=False, cancel_futures=True)


def with_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call back on the loop from a thread; does nothing if the loop has closed meanwhile."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        log.debug("the event loop closed before pages reached it")


def rank_feature(context: RankContext) -> HandoverRank | None:
    """Return the rank's side of hand-overs, or None if the configuration names no carrier."""
    options = terms_of(context.config)
    return None if options is None else HandoverRank(context, options)
