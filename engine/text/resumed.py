"""Output that a client has from another engine, turned into text again, so that the next output fits to it.

Owns: the check of such output.  Does not know: actors, how the other engine was lost, what comes next.
"""

import numpy as np

from engine.messages import Delta, Tokenize, Usage
from engine.text.codec import TextCodec, TextStream
from engine.text.logprobs import logprob_texts
from engine.types.errors import RequestError
from engine.types.logprobs import Logprobs


def resumed_delta(request: Tokenize, codec: TextCodec, vocab_size: int, stream: TextStream, usage: Usage) -> Delta:
    """Return the delta of ``RequestOptions.resumed``, and bring the request's stream to its end.

    Its tokens have a log probability of 0 if any are requested.  Raises RequestError for impossible output."""
    token_ids = np.frombuffer(request.options.resumed, dtype=np.int32)
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise RequestError("the output to go on from has tokens that the model does not have", code="not_resumable")
    text = stream.push(token_ids.tolist())
    if stream.matched is not None:
        raise RequestError("the output to go on from has ended with a stop string", code="not_resumable")
    listed = token_ids.tolist() if request.params.logprobs is not None else ()
    return Delta(
        request_id=request.request_id,
        text=text,
        token_ids=request.options.resumed,
        usage=usage,
        logprobs=tuple(logprob_texts(codec, token_id, Logprobs(logprob=0.0)) for token_id in listed),
        reasoning=stream.take_thoughts(),
        resumed=True,
    )
