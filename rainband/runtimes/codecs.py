"""The codecs of a run: whether they fit its strategy, and how they are made from its configuration."""

from __future__ import annotations

from collections.abc import Callable

from rainband.codecs.codec import Codec
from rainband.codecs.find import codec_names, load_codec, text_of
from rainband.options import OptionError, RunOptions, opt
from rainband.runtimes.config import RunConfig
from rainband.strategy import Requirements

NAMES = ("codec", "pull_codec")


def codecs_of(config: RunConfig) -> tuple[Codec | None, Codec | None]:
    """Return the codecs with which workers and servers send, or None."""
    return _made(config.codec), _made(config.pull_codec)


def _made(typed: str) -> Codec | None:
    return load_codec(typed) if typed else None


def with_codec_text(options: RunOptions) -> RunOptions:
    """Return the options with codecs as text, if they were given as objects; raise if there is none such."""
    typed = {name: options[name] for name in NAMES if options.get(name) is not None}  # type: ignore[literal-required]
    return {**options, **{name: _text(name, value) for name, value in typed.items()}}  # type: ignore[typeddict-item]


def _text(name: str, value: object) -> str:
    if value in ("", "none"):
        return ""
    try:
        return text_of(value)  # type: ignore[arg-type]  # anything else is refused there
    except ValueError as error:
        raise OptionError(f"{opt(name, value)}: {error}") from None


def check_codecs(options: RunOptions, name: str, requires: Requirements) -> None:
    """Raise if what the workers or servers of a strategy send cannot be encoded by these codecs."""
    _check_codec(options, name, requires)
    typed = options.get("pull_codec")
    if not typed:
        return
    if requires.tree_arity:
        raise OptionError(f"{opt('pull_codec', typed)}: the servers of {name} pass on exact parameters. Omit it.")
    if not requires.servers or requires.coordinated:
        why = "its line searches need exact parameters" if requires.coordinated else "it has no servers that send them"
        raise OptionError(f"{opt('pull_codec', typed)}: {name} cannot use it, because {why}. Omit it.")
    if not load_codec(typed).properties.of_values:
        raise OptionError(
            f"{opt('pull_codec', typed)}: it is for gradients, and servers send parameters. Choose from "
            f"{', '.join(_those(lambda codec: codec.properties.of_values))}."
        )
    if options.get("record"):
        raise OptionError(f"{opt('record', True)} repeats pulls as they were: omit {opt('pull_codec', typed)}.")


def _check_codec(options: RunOptions, name: str, requires: Requirements) -> None:
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
    if requires.tree_arity:
        return "its servers pass on sums of gradients, which are exact"
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
