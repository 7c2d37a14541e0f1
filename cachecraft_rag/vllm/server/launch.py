"""Start of vLLM's own OpenAI-compatible server with the connector and the endpoint set up."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cachecraft_rag.engine.config import EngineConfig
from cachecraft_rag.errors import ConfigError
from cachecraft_rag.server.settings import EndpointSettings
from cachecraft_rag.store.config import CACHE_FOLDER
from cachecraft_rag.vllm.beside import check_beside, connectors_in
from cachecraft_rag.vllm.options import VLLMOptions
from cachecraft_rag.vllm.plugin import ENDPOINT, PLUGIN
from cachecraft_rag.vllm.refusals import missing_arguments
from cachecraft_rag.vllm.served_model import VLLMModel
from cachecraft_rag.vllm.settings import ConnectorSettings, check_config
from cachecraft_rag.vllm.versions import require_vllm

logger = logging.getLogger("cachecraft_rag.vllm")

# Arguments that this module sets, so users cannot pass them.
_OURS = ("--model", "--dtype", "--tokenizer", "--kv-connector", "--config")
_LOG_CONFIG = "VLLM_LOGGING_CONFIG_PATH"
_JSON_LOGS = Path(__file__).with_name("json_logs.json")
_NEVER_S = 1e9  # interval of vLLM's statistics in its log, if it should not log any
# Longest wait in whole seconds for open connections once vLLM has ended: it may leave requests unfinished.
_CLOSING_S = 5


def serve(
    model: str,
    *,
    store: Path,
    config: EngineConfig,
    endpoint: EndpointSettings,
    arguments: Sequence[str] = (),
    json_logs: bool = False,
) -> None:
    """Serve a model until the process is stopped, then return. Only for the main thread, which gets the signals.

    Environment variables of this process change: VLLM_PLUGINS gets the names of this package's plugins, which set
    CACHECRAFT_SEAL_KEY, and PROMETHEUS_MULTIPROC_DIR is removed. VLLM_WORKER_MULTIPROC_METHOD becomes "spawn" unless it
    is set, VLLM_LOGGING_CONFIG_PATH is set with `json_logs` unless it is set, and VLLM_LOG_STATS_INTERVAL with
    `--disable-log-stats`. The settings are logged.

    Args:
        model: Hugging Face name or folder, whose weights are on this machine, or "demo"; also the name that clients
            use, unless `arguments` name another.
        store: folder of the store.
        config: of the engine; what vLLM decides itself is refused.
        endpoint: settings of requests; `root` and `model` are filled in here.
        arguments: further ones of vLLM's server, as on its command line.
        json_logs: write the log lines of all processes as JSON, those of vLLM and of HTTP requests too, unless vLLM is
            given another logging configuration.

    Arguments, settings and models that cannot be used are refused before vLLM starts, which takes a minute. Raises
    SystemExit if vLLM's command line refuses an argument, or `arguments` ask for its help.
    """
    check_arguments(arguments)
    config = check_config(config)
    # Refused models and options end here, in a moment: importing vLLM takes many seconds, and starting it a minute.
    served = VLLMModel.load(
        model, dtype=config.dtype, options=VLLMOptions.from_arguments(arguments)
    )
    require_vllm()
    # One API server, so one process counts: with files that several would share, our own metrics would be left out.
    if os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None) is not None:
        logger.warning(
            "PROMETHEUS_MULTIPROC_DIR is not used: one process serves HTTP, and /metrics is its own"
        )
    named = [name for name in os.environ.get("VLLM_PLUGINS", "").split(",") if name]
    os.environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*named, PLUGIN, ENDPOINT]))
    settings = ConnectorSettings(
        str((store / CACHE_FOLDER).absolute()),
        served.identity,
        config,
        endpoint=replace(endpoint, root=str(store.absolute()), model=model),
    )
    logger.info("Settings: %s", summary(settings))
    if json_logs:
        os.environ.setdefault(_LOG_CONFIG, str(_JSON_LOGS))
    _run(served, model, settings, arguments)


def summary(settings: ConnectorSettings) -> str:
    """Return the settings that operators ask for first, in one line; those that are None are left out.

    A recompute ratio that CFO decides is not left out: it reads "of each chunk's CFO".
    """
    config = settings.config
    endpoint = settings.endpoint
    ratio = config.reuse.ratio_in_use
    parts = {
        "store": settings.store,
        "namespace": settings.namespace,
        "codec": config.store.codec,
        "disk bytes": config.store.disk_bytes,
        "recompute ratio": ratio if ratio is not None else "of each chunk's CFO",
        "plain prompts": endpoint.plain_prompts,
        "search system": endpoint.search_system,
        "client settings": endpoint.client_settings,
        "session header": endpoint.session_header,
        "tenant header": endpoint.tenant_header,
    }
    return ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise ConfigError for arguments of vLLM's that are set here, or that conflict with what is set here.

    Set here are --model, --dtype, --tokenizer, --kv-connector and --config, also with a part of their value named after
    a dot. --api-server-count (-asc) and --headless conflict. Underscores count as hyphens.
    """
    for argument in arguments:
        name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
        if name in _OURS:
            raise ConfigError(f"{name} is set by this command; use its own options")
        if name in ("--api-server-count", "-asc"):
            raise ConfigError(
                "--api-server-count: the statistics of requests are kept in one API server; leave it out"
            )
        if name == "--headless":
            raise ConfigError("--headless serves no HTTP; leave it out")


def _run(
    served: VLLMModel, model: str, settings: ConnectorSettings, arguments: Sequence[str]
) -> None:
    import uvloop
    from vllm.entrypoints.openai.api_server import run_server
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.common.startup import cli_env_setup
    except ImportError:  # vLLM 0.32
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()
    parser: Any = make_arg_parser(
        FlexibleArgumentParser(prog="cachecraft serve", allow_abbrev=False)
    )
    is_named = any(argument.startswith("--served") for argument in arguments)
    names = () if is_named else ("--served-model-name", model)
    fixed = ("--model", str(served.folder), "--dtype", served.layout.dtype)
    args = parser.parse_args([*fixed, *names, *arguments])
    served.require_ranks(args.tensor_parallel_size)
    # Reports of filled requests are sent with vLLM's statistics, so only the logging of statistics is switched off.
    if args.disable_log_stats:
        args.disable_log_stats = False
        os.environ["VLLM_LOG_STATS_INTERVAL"] = str(_NEVER_S)
    for argument, value in missing_arguments(model, served.arguments, vars(args)).items():
        setattr(args, argument, value)
    # vLLM itself reads the variable; the server that answers HTTP takes its configuration from this attribute only.
    # Some versions read the attribute although their command line has no such argument, so it may not exist here.
    chosen_file = getattr(args, "log_config_file", None)
    if chosen_file is None and os.environ.get(_LOG_CONFIG) == str(_JSON_LOGS):
        args.log_config_file = str(_JSON_LOGS)
    # Passed as an object: on a command line, the list of processes would show the key that signs requests.
    beside = connectors_in(args.kv_transfer_config)
    check_beside(beside, settings.config.reuse, settings.endpoint.client_settings)
    args.kv_transfer_config = settings.transfer_config(beside)
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args, timeout_graceful_shutdown=_CLOSING_S))
