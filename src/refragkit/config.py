"""Composition and checking of configurations: overrides, allow-listed targets, signatures.

Hydra composes; this module makes sure that what it composed is what the user meant. Every unknown or missing
key and every wrong type of the whole configuration is reported at once, with its path and the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from refragkit.errors import ConfigError

GROUPS: tuple[str, ...] = (
    "task",
    "model",
    "adapter",
    "data",
    "retriever",
    "reward",
    "hardware",
    "tracking",
    "method",
    "experiment",
)

# Every other key at the root is a parameter of the task.
ROOT_KEYS: frozenset[str] = frozenset({*GROUPS, "seed", "dry_run", "resume", "paths", "choices"})

# Constructor parameters that the composition root passes as built objects; they never stand in a YAML file.
INJECTED: Mapping[str, frozenset[str]] = {
    "task": frozenset({"run"}),
    "model": frozenset({"seed", "device"}),
    "data": frozenset({"cache_dir", "seed"}),
    "retriever": frozenset({"cache_dir"}),
    "method": frozenset({"components"}),
    "tracking": frozenset({"outputs"}),
}

# `_target_` runs code: only our own package and these names may be named in a configuration.
ALLOWED_TARGETS: frozenset[str] = frozenset(
    {
        "lightning.pytorch.callbacks.EarlyStopping",
        "lightning.pytorch.strategies.DDPStrategy",
        "lightning.pytorch.strategies.FSDPStrategy",
        "torch.optim.AdamW",
    }
)


def conf_dir() -> Path:
    """The folder of the YAML groups: inside the package when installed from a wheel, else the checkout's."""
    packaged = Path(__file__).parent / "conf"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "conf"


def group_options(group: str) -> dict[str, str]:
    """The options of a group with the one-line description that opens each file.

    Args:
        group: for example ``"method"``.

    Returns:
        option name -> description, sorted by name.
    """
    options = {}
    for file in sorted((conf_dir() / group).glob("*.yaml")):
        with file.open(encoding="utf-8") as lines:
            first = next((line for line in lines if not line.startswith("# @package")), "")
        options[file.stem] = first.lstrip("# ").strip() if first.startswith("#") else ""
    return options


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most like ``word``, or None where nothing is similar."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.5)
    return matches[0] if matches else None


def _did_you_mean(word: str, candidates: Iterable[str]) -> str:
    near = nearest(word, candidates)
    return f"; did you mean '{near}'?" if near else ""


def _leaf_paths(node: Any, prefix: str = "") -> list[str]:
    if not isinstance(node, DictConfig):
        return [prefix] if prefix else []
    paths = [prefix] if prefix else []
    for key in map(str, node):
        paths += _leaf_paths(node._get_node(key), f"{prefix}.{key}" if prefix else key)
    return paths


def check_overrides(overrides: Sequence[str]) -> None:
    """Check command-line overrides before Hydra sees them.

    Args:
        overrides: as on the command line, sweeps (``method=sft,refrag``) included.

    Raises:
        ConfigError: names every unknown key and option at once, with the nearest valid one.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    problems: list[str] = []
    groups: list[str] = []
    values = []
    parser = OverridesParser.create()
    root_keys = [*GROUPS, "seed", "dry_run", "resume", "paths"]
    for text in overrides:
        try:
            (override,) = parser.parse_overrides([text])
        except OverrideParseException:
            problems.append(
                f"'{text}' is not an override: expected key=value, such as method=refrag or seed=1; a value with"
                " brackets, quotes or commas needs quotes inside the shell's, such as 'data.path=\"a,b\"'"
            )
            continue
        key = override.key_or_group
        if key.split("/")[0].split(".")[0] == "hydra":
            continue
        if key in GROUPS and override.is_add():
            problems.append(f"{text}: '{key}' is always there; choose an option with {text.lstrip('+')}")
        elif key in GROUPS and not override.is_delete():
            options, before = group_options(key), len(problems)
            chosen: list[Any] = (
                list(override.sweep_string_iterator()) if override.is_sweep_override() else [override.value()]
            )
            for option in chosen:
                if isinstance(option, (dict, list)):
                    problems.append(f"{key}={option}: expected the name of one option: {', '.join(options)}")
                elif str(option) not in options:
                    listed = ", ".join(options) or "none"
                    option = "null" if option is None else option
                    problems.append(
                        f"{key}={option!s}: '{key}' has no option '{option!s}'"
                        f"{_did_you_mean(str(option), options)} (options: {listed})"
                    )
            if len(problems) == before:
                groups.append(f"{key}={'null' if chosen[0] is None else chosen[0]}")
        elif override.is_delete() and "." not in key:
            problems.append(f"{text}: '{key}' can't be removed; groups that may be empty have an option none")
        elif override.is_add() or override.is_force_add() or override.is_delete():
            continue
        else:
            values.append((text, key))
    valid = _leaf_paths(_hydra_compose(groups)) if values else []
    for text, key in values:
        path = key.replace("/", ".")
        if path in valid:
            continue
        candidates = root_keys + valid if "." not in path else valid
        problems.append(f"{text}: there is no key '{path}'{_did_you_mean(path, candidates)}")
    if problems:
        raise ConfigError("\n".join(problems))


def _hydra_compose(overrides: Sequence[str]) -> DictConfig:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    previous = dict(GlobalHydra.instance().__dict__)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
            cfg = hydra_compose("config", overrides=list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_message(error)) from error
    finally:
        GlobalHydra.instance().__dict__.update(previous)
    choices = {g: cfg.hydra.runtime.choices.get(g) for g in GROUPS}
    with open_dict(cfg):
        del cfg["hydra"]
    return with_choices(cfg, choices)


def one_message(error: BaseException) -> str:
    """What Hydra or OmegaConf has to say, its causes included, without its internals."""
    parts = [str(error)]
    cause = error.__cause__
    while cause is not None:
        if str(cause) not in parts[0]:
            parts.append(str(cause))
        cause = cause.__cause__
    return re.sub(r"\n\s*(full_key|object_type)[^\n]*", "", "\n".join(parts))


def with_choices(cfg: DictConfig, choices: Mapping[str, str | None]) -> DictConfig:
    """Record in ``cfg.choices`` which option of each group was chosen, since the nodes don't know their names."""
    with open_dict(cfg):
        cfg.choices = {group: choices.get(group) for group in GROUPS}
    return cfg


def compose(overrides: Sequence[str] = ()) -> DictConfig:
    """Compose and check the configuration that ``python run.py <overrides>`` would run.

    Args:
        overrides: as on the command line, without sweeps.

    Returns:
        The configuration, with the chosen option of each group under ``choices``.

    Raises:
        ConfigError: all unknown keys, options, targets and wrong types at once.
    """
    from refragkit.text_overrides import quote_text

    register_resolvers()
    overrides = quote_text(overrides)
    check_overrides(overrides)
    cfg = _hydra_compose(overrides)
    validate(cfg)
    return cfg


def register_resolvers() -> None:
    """Make ``${run_id:}``, four random hex digits fixed for the process's run, known to OmegaConf."""
    import secrets

    if not OmegaConf.has_resolver("run_id"):
        OmegaConf.register_new_resolver("run_id", lambda: secrets.token_hex(2), use_cache=True)


def is_allowed(target: str) -> bool:
    """Whether a ``_target_`` may be named in a configuration."""
    return target in ALLOWED_TARGETS or target.startswith("refragkit.")


def locate(target: str, where: str) -> Callable[..., Any]:
    """Import an allow-listed target.

    Args:
        target: dotted path of a class or function.
        where: the configuration path that names it, for the error.

    Raises:
        ConfigError: the target is not on the allow-list or does not exist.
    """
    if not isinstance(target, str) or not is_allowed(target):
        raise ConfigError(
            f"{where}._target_: '{target}' is not on the allow-list; expected a name in the refragkit package"
            f" or one of {', '.join(sorted(ALLOWED_TARGETS))}"
        )
    module_name, _, rest = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), rest)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{where}._target_: '{target}' can't be imported ({error})") from error
    if not callable(found):
        raise ConfigError(f"{where}._target_: '{target}' is not a class or function")
    return typing.cast(Callable[..., Any], found)


def _parameters(target: Callable[..., Any], injected: frozenset[str]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(target).parameters
    return {
        name: p
        for name, p in parameters.items()
        if name not in injected and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }


def node_parameters(group: str, target: str) -> dict[str, tuple[inspect.Parameter, Any]]:
    """Name -> (parameter, type hint) that the YAML node of a group's target must hold."""
    function = locate(target, group)
    # A dataclass inherits fields whose hints only their own module can resolve.
    is_plain_class = inspect.isclass(function) and not dataclasses.is_dataclass(function)
    hinted: Any = function.__init__ if is_plain_class else function
    hints = _type_hints(hinted)
    parameters = _parameters(function, INJECTED.get(group, frozenset()))
    return {key: (parameter, hints.get(key, Any)) for key, parameter in parameters.items()}


def _type_hints(hinted: Any) -> dict[str, Any]:
    """Name -> type hint; a type that is imported for type checkers only stands for anything."""
    unknown: dict[str, Any] = {}
    while True:
        try:
            return typing.get_type_hints(hinted, localns=unknown)
        except NameError as error:
            unknown[str(error.name)] = Any


def type_problem(value: Any, hint: Any) -> str | None:
    """What ``hint`` expects if ``value`` does not fit it, else None. Unknown hints accept everything."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, (str, typing.TypeVar)):
        return None
    if origin in (Union, types.UnionType):
        expected = [type_problem(value, a) for a in arguments]
        return None if None in expected else " or ".join(dict.fromkeys(e for e in expected if e))
    if origin is Literal:
        return None if value in arguments else "one of " + ", ".join(map(str, arguments))
    if hint is type(None) or hint is None:
        return None if value is None else "null"
    if hint is bool:
        return None if isinstance(value, bool) else "true or false"
    if hint is int:
        return None if isinstance(value, int) and not isinstance(value, bool) else "a whole number"
    if hint is float:
        return None if isinstance(value, (int, float)) and not isinstance(value, bool) else "a number"
    if hint is str:
        return None if isinstance(value, str) else "a string"
    base = origin or hint
    if inspect.isclass(base) and base is not str:
        if issubclass(base, Mapping):
            return None if isinstance(value, Mapping) else "a mapping"
        if issubclass(base, Sequence):
            if not isinstance(value, (list, tuple)):
                return "a list"
            inner = (
                next((p for v in value if (p := type_problem(v, arguments[0]))), None) if arguments else None
            )
            return f"a list of which each is {inner}" if inner else None
    return None


def validate(cfg: DictConfig) -> None:
    """Check every node against the signature of its target.

    Args:
        cfg: a composed configuration.

    Raises:
        ConfigError: one line for each unknown key, missing key, wrong type and refused target.
    """
    allowed = _task_parameters(cfg)
    extra = task_keys(cfg)
    known = {*ROOT_KEYS, *allowed} - {"choices"}
    problems = [f"unknown key '{key}'{_did_you_mean(key, known)}" for key in extra if key not in allowed]
    for key, hint in (("seed", int), ("dry_run", bool), ("resume", str | None)):
        if expected := type_problem(cfg.get(key), hint):
            problems.append(f"{key}: expected {expected}, got {cfg.get(key)!r}")
    problems += _path_problems(cfg)
    for group in GROUPS:
        node = cfg.get(group)
        if node is None:
            continue
        if not isinstance(node, DictConfig):
            problems.append(
                f"{group}: expected one of the options {', '.join(group_options(group))}, got {node!r}"
            )
            continue
        try:
            values = OmegaConf.to_container(node, resolve=True)
        except OmegaConfBaseException as error:
            problems.append(f"{group}: {one_message(error)}")
            continue
        if group == "task":
            values = typing.cast(dict[str, Any], values) | {k: extra[k] for k in extra if k in allowed}
        at_root = frozenset(extra) if group == "task" else frozenset()
        problems += _node_problems(group, typing.cast(dict[str, Any], values), at_root)
    if problems:
        raise ConfigError("\n".join(problems))


def _path_problems(cfg: DictConfig) -> list[str]:
    paths = (
        OmegaConf.to_container(cfg.paths, resolve=True) if isinstance(cfg.get("paths"), DictConfig) else {}
    )
    assert isinstance(paths, dict)
    problems = [
        f"unknown key 'paths.{key!s}'; there is only paths.outputs" for key in paths if key != "outputs"
    ]
    if not isinstance(paths.get("outputs"), str) or not paths["outputs"]:
        problems.append(f"paths.outputs: expected a folder, got {paths.get('outputs')!r}")
    return problems


def task_keys(cfg: DictConfig) -> dict[str, Any]:
    """The root keys that belong to the chosen task, such as ``prompt`` of ``task=generate``."""
    own = OmegaConf.masked_copy(cfg, [key for key in map(str, cfg) if key not in ROOT_KEYS])
    own._set_parent(cfg)  # what it refers to stands outside
    try:
        return typing.cast(dict[str, Any], OmegaConf.to_container(own, resolve=True))
    except OmegaConfBaseException as error:
        raise ConfigError(one_message(error)) from error


def _task_parameters(cfg: DictConfig) -> set[str]:
    try:
        return set(node_parameters("task", cfg.task._target_))
    except (ConfigError, OmegaConfBaseException, AttributeError):
        return set()  # the task's own node reports what is wrong


def _node_problems(group: str, values: dict[str, Any], at_root: frozenset[str] = frozenset()) -> list[str]:
    """What is wrong with a node; keys in ``at_root`` stand at the root of the configuration, not in the node."""
    if "_target_" not in values:
        return [f"{group}: has no _target_"]
    try:
        parameters = node_parameters(group, values["_target_"])
        for path, target in _nested_targets(values, group):
            locate(target, path)
    except ConfigError as error:
        return [str(error)]
    problems = []
    keys = set(values) - {"_target_"}
    for key in sorted(keys - set(parameters), key=str):
        near = nearest(str(key), parameters)
        problems.append(f"{group}.{key}: unknown key" + (f"; did you mean '{group}.{near}'?" if near else ""))
    for key in sorted(set(parameters) - keys):
        # What an option of another group brings along, such as method=distill the node `convert`
        if group == "task" and parameters[key][0].default is None:
            continue
        problems.append(f"{group}.{key}: missing key")
    for key in sorted(keys & set(parameters)):
        where = key if key in at_root else f"{group}.{key}"
        if values[key] == "???":
            problems.append(f"{where}: needs a value, give {where}=...")
        elif expected := type_problem(values[key], parameters[key][1]):
            problems.append(f"{where}: expected {expected}, got {values[key]!r}")
    return problems


def _nested_targets(node: Any, path: str) -> list[tuple[str, str]]:
    found = []
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "_target_":
                found.append((path, value))
            else:
                found += _nested_targets(value, f"{path}.{key}")
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            found += _nested_targets(value, f"{path}[{index}]")
    return found


def instantiate(cfg: DictConfig, group: str, **injected: Any) -> Any:
    """Build the component of a group.

    Args:
        cfg: the whole configuration.
        group: for example ``"retriever"``.
        injected: built objects for the parameters that no YAML holds.

    Returns:
        What the target returns for the node's keys as plain Python values.

    Raises:
        ConfigError: the target refuses its values.
    """
    values = typing.cast(dict[str, Any], OmegaConf.to_container(cfg[group], resolve=True))
    if group == "task":
        values |= task_keys(cfg)
    target = locate(values.pop("_target_"), group)
    own = _parameters(target, frozenset())
    return target(**values, **{k: v for k, v in injected.items() if k in own})


def flatten(cfg: Any, prefix: str = "") -> dict[str, Any]:
    """Scalar leaves by dotted path; lists are rendered as text."""
    if isinstance(cfg, (DictConfig, ListConfig)):
        cfg = OmegaConf.to_container(cfg, resolve=True)
    if not isinstance(cfg, Mapping):
        return {prefix: cfg if isinstance(cfg, (int, float, str, bool)) or cfg is None else str(cfg)}
    leaves: dict[str, Any] = {}
    for key, value in cfg.items():
        leaves |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves
