"""`python -m benchmarks COMMAND …`: each command is the `main` of the module with its name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.main import get_command

from cachecraft_rag.cli.app import Command, Group
from cachecraft_rag.cli.console import print_error
from cachecraft_rag.errors import CacheCraftError

COMMANDS = {
    "audits": "Times of requests beside audits, and what audits compute",
    "batches": "Prefill and decoding of several requests at once",
    "bypass": "Time of a prompt that is left to vLLM, against a vLLM without this package",
    "cake-steps": "Times of steps while chunk-caches load, against the same steps alone (Cake Fig. 7)",
    "cake": "Computing, loading, and both at once (Cake), at limited disk speeds",
    "early-termination": "Early termination against none, and against a smaller ratio of the same cost",
    "eval": "Every method of the papers and of this package against full prefill",
    "families": "Model families of the installed transformers: served, or refused with the reason",
    "follow-ups": "Hit rates of follow-up questions, with and without their conversation",
    "gpu-model": "A cost model of reuse on a GPU, with copies and launches counted on this machine",
    "load": "Requests at random times to a vLLM server: other users' tokens, TTFT, break-even hit rate",
    "loading": "Read speed against dd, and the loading time hidden while computing",
    "loader-bookkeeping": "CPU time that the loader spends on its own lists",
    "memory": "Peak memory of a request",
    "naive-reuse": "Overlap of attention in a prompt, and wrong answers of naive reuse",
    "own-instruction": "Four orders of three documents after a client's own instruction, against vLLM alone",
    "papers": "The papers' figures, with our verdicts and the command for each",
    "planning-costs": "CPU time of planning a request over vLLM, phase by phase",
    "prompt-forms": "What prompts in the forms of common applications reuse, passages in a new order each time",
    "plain-prompts": "Unmarked prompts against the same passages as documents",
    "premises": "What the papers presuppose, looked at on a model and data",
    "quality-replay": "A quality target on many streams, replayed from answers that are given once",
    "quality-target": "A quality target on a stream of questions, against fixed recompute ratios",
    "queue-preloading": "Times of requests that wait, with and without loading for the whole queue",
    "request-costs": "Launches, copies, waits and steps of one request over vLLM, and the time of Python",
    "reserved-memory": "Memory reserved for filling prompts on GPUs, and the requests at once that it costs",
    "rows": "What each recomputed row buys, in right answers, divergence and time",
    "same-answers": "The same answers and statistics as another checkout, on 200 requests",
    "scale": "Retrieval, look-up and planning as the number of chunks grows",
    "serve": "Throughput, and times to first tokens and whole answers, under load",
    "simulate": "Eviction policies and budgets, replayed over drawn or given traffic",
    "tokens": "Tokens to prefill and to decode in conversations with passages",
    "ttft": "Time to the first token: reuse against the model's own prefill, and other engines",
    "vllm-contract": "The names that we use of vLLM, checked in the wheels of its versions",
    "vllm-families": "Model families that vLLM runs: served from chunk-caches, or refused with the reason",
    "vllm-passes": "Python's time in a pass over vLLM, layer by layer and all layers at once",
    "stream": "Recomputation and divergence over a stream of repeated questions",
}
_MODULES = {"eval": "evaluate"}  # where the module has another name

app = typer.Typer(
    name="python -m benchmarks",
    cls=Group,
    help="Experiments with cachecraft-rag. Also: `python -m benchmarks.gpu` and `python -m benchmarks.server`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def module_of(name: str) -> Any:
    """The module of a command."""
    return import_module(f"benchmarks.{_MODULES.get(name, name.replace('-', '_'))}")


def command(name: str) -> Callable[[typer.Context], None]:
    """The command that imports the module with this name, and runs it with the arguments that follow."""

    def run(context: typer.Context) -> None:
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(cls=Command)(module_of(name).main)
        get_command(alone).main(
            context.args, prog_name=f"{app.info.name} {name}", standalone_mode=False
        )

    return run


_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
for _name, _help in COMMANDS.items():
    app.command(_name, help=_help, context_settings=_PASSED_ON)(command(_name))


def main() -> None:
    """Run the command line; a `CacheCraftError` becomes a message and exit code 2."""
    try:
        app()
    except CacheCraftError as error:
        print_error(error)
        sys.exit(2)


if __name__ == "__main__":
    main()
