"""Builds the parsers of function calls and of thoughts for a configuration and a chat template.

Owns: the built-in parser for a template.  Does not know: the formats.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from engine.checkpoints.use import GENERATING, ModelUse
from engine.config import Config
from engine.plugins.encoder.choice import chosen_encoder
from engine.plugins.hookspecs import ParserContext
from engine.plugins.kinds import REASONING_PARSER, TOOL_PARSER
from engine.plugins.manager import Plugins
from engine.plugins.reasoning_parser.settings import ReasoningParserSettings
from engine.plugins.tool_parser.settings import ToolParserSettings
from engine.settings.sections import PluginsSection
from engine.text.codec import Formats, TextCodec, load_codec
from engine.text.reasoning import ReasoningFormat
from engine.text.tool_calls import ToolFormat

log = logging.getLogger(__name__)

Format = TypeVar("Format", ToolFormat, ReasoningFormat)

# Text in a template -> the parser for it; the first match counts.
TOOL_SIGNS: Final = (
    ("<|channel|>", "harmony"),
    ("<|tool_call_begin|>", "kimi_k2"),
    ("<｜tool▁call▁begin｜>", "deepseek_v3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm4"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters"', "llama3_json"),
)
REASONING_SIGNS: Final = (
    ("<|channel|>", "harmony"),
    ("<think>", "think"),
    ("</think>", "think"),
    ("Here is my thought process:", "granite"),
)


def plugin_codec(config: Config, directory: Path, use: ModelUse = GENERATING) -> TextCodec:
    """Load the codec with the parsers chosen by the configuration or the chat template.

    directory: the checkpoint's.  use: the model's.

    Raises WeightsError with the file, or PluginError."""
    return load_codec(config.model, directory, plugin_formats(config), use, chosen_encoder(config, directory))


def plugin_formats(config: Config) -> Callable[[str], Formats]:
    """Return a function from a chat template, '' for none, to the formats of the model's output."""
    section = config.plugins

    def formats(template: str) -> Formats:
        (tool_name, tool_sign), (reasoning_name, reasoning_sign) = wanted_parsers(section, template)
        tools = _build(section, TOOL_PARSER, tool_name, template, ToolFormat)
        log.info("plugin: %s.%s (%s)", TOOL_PARSER, tool_name, tool_sign)
        if reasoning_name == "none":
            return Formats(tool_name, tools)
        reasoning = _build(section, REASONING_PARSER, reasoning_name, template, ReasoningFormat)
        log.info("plugin: %s.%s (%s)", REASONING_PARSER, reasoning_name, reasoning_sign)
        return Formats(tool_name, tools, reasoning_name, reasoning)

    return formats


def _build(section: PluginsSection, kind: str, name: str, template: str, protocol: type[Format]) -> Format:
    plugins = Plugins({kind: name}, section.options)
    return plugins.build(plugins.names[kind], ParserContext(template), protocol)


def wanted_parsers(section: PluginsSection, template: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return (name, reason for the choice) of the tool parser and the reasoning parser; 'none' for no parser."""
    return (
        _wanted(ToolParserSettings.read(section).tool_parser, template, TOOL_SIGNS, "hermes"),
        _wanted(ReasoningParserSettings.read(section).reasoning_parser, template, REASONING_SIGNS, "none"),
    )


def _wanted(setting: str, template: str, signs: tuple[tuple[str, str], ...], default: str) -> tuple[str, str]:
    """Return (name of the parser, reason for the choice)."""
    if setting != "auto":
        return setting, "chosen by name"
    for sign, name in signs:
        if sign in template:
            return name, f"auto: the chat template has {sign}"
    return default, "auto: the chat template names no format"
