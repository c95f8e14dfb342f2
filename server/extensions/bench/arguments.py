"""The arguments of ``callboard bench``."""

import argparse
import os
import sys
from argparse import ArgumentParser
from pathlib import Path

from server.arguments import (
    NO_CONFIGURATION,
    count,
    natural,
    picture,
    positive,
    share,
    shared_arguments,
    target_argument,
)

COMMAND = "server.extensions.bench.command"
EPILOG = """\
examples:
  callboard bench serve --rate 4 --requests 200 --prompt 512 --output 128 --slo ttft=0.5,tpot=0.05
  callboard bench serve --url http://other:8000 --concurrency 32 --turns 4 --prefix 1000
  callboard bench serve --trace monday.jsonl --save monday.json --plot monday.png
  callboard bench offline path/to/checkpoint --sequences 64 --longest 512
  callboard bench compare before.json after.json
  callboard bench league model.gguf checkpoint/ --streams 1 8 --llama-python VENV/bin/python --plot league.png
"""
LEAGUE = """\
Serves each model by callboard, and by the others that are there: a GGUF file by llama.cpp (of the PATH, or the wheel
xllamacpp of an interpreter) and ik_llama.cpp, a checkpoint by vLLM, and both by transformers' generate in batches.
Each gets the same texts, in turns.  A table has tokens a second, how many times the first server's, and the same by
the servers' processor time.
"""


def add_commands(commands: "argparse._SubParsersAction[ArgumentParser]") -> None:
    """Add the command."""
    bench = commands.add_parser(
        "bench",
        help="measure a server, or the engine on this machine",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = bench.add_subparsers(required=True, metavar="KIND")
    _add_serve(kinds.add_parser("serve", help="send a load to an OpenAI-compatible server"))
    loads_model = [target_argument(), shared_arguments("warning")]
    offline = kinds.add_parser("offline", parents=loads_model, help="run a batch on this machine, without HTTP")
    offline.add_argument("--sequences", type=count, default=256, help="of the batch (default: 256)")
    offline.add_argument("--longest", type=count, default=1024, help="prompt, and output (default: 1024 tokens)")
    offline.add_argument("--save", type=Path, metavar="FILE", help="write the result as JSON")
    offline.set_defaults(run=f"{COMMAND}:offline")
    _add_league(kinds.add_parser("league", help="run servers of a model beside each other", description=LEAGUE))
    compare = kinds.add_parser("compare", help="compare two results, figure by figure")
    compare.add_argument("first", type=Path)
    compare.add_argument("second", type=Path)
    compare.add_argument("--plot", type=picture, metavar="PNG", help="draw both; needs matplotlib")
    compare.set_defaults(run=f"{COMMAND}:compare", **NO_CONFIGURATION)


def _add_league(league: ArgumentParser) -> None:
    league.add_argument("models", nargs="+", metavar="MODEL", help="GGUF files and directories of checkpoints")
    league.add_argument("--streams", type=count, nargs="+", default=[1, 8, 32], help="at once (default: 1 8 32)")
    loads = ["short", "long", "prefix", "prompt"]
    league.add_argument("--loads", nargs="+", choices=loads, default=loads, help="default: all")
    precisions = "model.quantization of callboard (default: none int8)"
    league.add_argument("--precisions", nargs="+", default=["none", "int8"], help=precisions)
    league.add_argument("--turns", type=count, default=3, help="measured, after one to warm up (default: 3)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    league.add_argument("--threads", type=count, default=cores, help="of each server (default: %(default)s)")
    league.add_argument("--llama-server", default="", metavar="FILE", help="llama.cpp's binary (default: of the PATH)")
    python = "else an interpreter that has xllamacpp (default: this one)"
    league.add_argument("--llama-python", default=sys.executable, metavar="FILE", help=python)
    league.add_argument("--ik-llama-server", default="", metavar="FILE", help="ik_llama.cpp's binary")
    python = "an interpreter that may have transformers (default: this one)"
    league.add_argument("--transformers-python", default=sys.executable, metavar="FILE", help=python)
    league.add_argument("--save", type=Path, metavar="FILE", help="write the figures as JSON")
    league.add_argument("--plot", type=picture, metavar="PNG", help="draw them; needs matplotlib")
    league.set_defaults(run=f"{COMMAND}:league", **NO_CONFIGURATION)


def _add_serve(parser: ArgumentParser) -> None:
    server = parser.add_argument_group("the server")
    server.add_argument(
        "--url", "--base-url", dest="base_url", default="http://127.0.0.1:8000", help="default: %(default)s"
    )
    server.add_argument("--model", dest="served", default="", help="default: the first one that the server lists")
    key = os.environ.get("OPENAI_API_KEY", "")
    server.add_argument("--key", "--api-key", dest="api_key", default=key, help="default: OPENAI_API_KEY")
    server.add_argument("--endpoint", choices=["chat", "completions"], default="chat", help="default: chat")
    server.add_argument("--field", action="append", default=[], metavar="NAME=JSON", help="what each body says besides")
    server.add_argument("--timeout", type=positive, default=600.0, metavar="S", help="of a request (default: 600)")
    load = parser.add_argument_group("the load")
    load.add_argument("--requests", type=count, default=100, help="conversations (default: 100)")
    load.add_argument("--prompt", type=count, default=128, help="words of a turn (default: 128)")
    load.add_argument("--output", type=count, default=128, help="most tokens of an answer (default: 128)")
    load.add_argument("--variation", type=share, default=0.0, help="0.5: lengths from half to 1.5 times that")
    load.add_argument("--prefix", type=natural, default=0, help="words that conversations begin with in common")
    load.add_argument("--groups", type=count, default=1, help="of conversations that share a prefix (default: 1)")
    load.add_argument("--turns", type=count, default=1, help="of a conversation (default: 1)")
    load.add_argument("--ignore-eos", action="store_true", help="answers of full length; not every server knows it")
    load.add_argument("--trace", type=Path, help="JSON lines instead: time, max_tokens, prompt or prompt_tokens")
    load.add_argument("--seed", type=natural, default=0, help="of the load (default: 0)")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--rate", type=positive, help="conversations a second, by a Poisson process")
    when.add_argument("--concurrency", type=count, help="so many at once, each after another (default: 16)")
    parser.add_argument("--burst", type=count, default=1, help="with --rate: so many begin together (default: 1)")
    parser.add_argument("--slo", default="", metavar="NAME=S,...", help="count what keeps to ttft=0.5,tpot=0.05,e2e=10")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--plot", type=picture, metavar="PNG", help="draw it; needs matplotlib")
    parser.set_defaults(run=f"{COMMAND}:serve", **NO_CONFIGURATION)
