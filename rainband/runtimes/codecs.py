"""The codecs of a run: whether they fit its strategy, and how they are made from its configuration."""

from __future__ import annotations

from collections.abc import Callable

from rainband.codecs.codec import Codec
from rainband.codecs.find import codec_names, load_codec, text_of
from rainband.options import OptionError, RunOptions, opt
from rainband.runtimes.config import RunConfig
from rainband.strategy import Requirements


def codec_of(config: RunConfig) -> Codec | None:
    """Return the codec with which workers send, or None."""
    return load_codec(config.codec) if config.codec else None


def with_codec_text(options: RunOptions) -> RunOptions:
    """Return the options with a codec as text, if it was given as an object; raise if there is none such."""
    if options.get("codec") in (None, "", "none"):
        return {**options, "codec": ""} if options.get("codec") else options
    try:
        return {**options, "codec": text_of(options["codec"] or "")}
    except ValueError as error:
        raise OptionError(f"{opt('codec', options['codec'])}: {error}") from None


def check_codec(options: RunOptions, name: str, requires: Requirements) -> None:
    """Raise if what the workers of a strategy send cannot be encoded by this codec."""
    typed = options.get("codec")
    if not typed:
        return
    if why := _no_codec(requires):
        raise OptionError(f"{opt('codec', typed)}: {name} cannot use it, because {why}. Omit it, or use downpour.")
    if options.get("record"):
        raise OptionError(f"{opt('record', True)} repeats pushes as they were computed: omit {opt('codec', typed)}.")
    properties = load_codec(typed).properties
    if requires.algorithm and not properties.linear:
        raise OptionError(
            f"{opt('codec', typed)}: the all-reduce of {name} cannot sum what it encodes. Choose from "
            f"{', '.join(_those(lambda codec: codec.properties.linear))}, or use sync, whose workers read each other's "
            "gradients."
        )
    if requires.local_steps and not properties.of_values:
        raise OptionError(
            f"{opt('codec', typed)}: the workers of {name} exchange models, and it is for gradients. Choose from "
            f"{', '.join(_those(lambda codec: codec.properties.of_values))}."
        )


def _no_codec(requires: Requirements) -> str:
    """Return why workers send nothing that could be encoded; empty: they do."""
    if requires.coordinated:
        return "its line searches need exact gradients"
    if requires.stages is not None:
        return "its workers send activations, which must arrive as they are"
    if requires.shared_memory:
        return "its workers write into one memory"
    if requires.tree_arity:
        return "its inner servers add gradients, which must arrive as they are"
    if not requires.servers and not requires.in_rounds:
        return "it has one process, which sends nothing"
    return ""


def _those(fits: Callable[[Codec], bool]) -> list[str]:
    """Return the built-in codecs that fit, as they are typed."""
    typed = [*codec_names(), "qsgd:8"]
    return [one for one in sorted(typed) if fits(load_codec(one))]
