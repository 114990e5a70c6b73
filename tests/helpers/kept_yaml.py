"""Cache of what Hydra makes of our yaml files, in pure Python: contents, parsed overrides, and composed groups."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from functools import cache
from pathlib import Path
from typing import Any

from hydra._internal import config_loader_impl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

CFG = Path(__file__).resolve().parents[2] / "cfg"


def keep() -> None:
    load, kept = OmegaConf.load, cache(lambda path: pickle.dumps(load(path)))

    def kept_load(file: Any) -> Any:
        path = Path(getattr(file, "name", file))
        return pickle.loads(kept(path)) if CFG in path.parents else load(file)

    OmegaConf.load = staticmethod(kept_load)
    for path in CFG.rglob("*.yaml"):
        kept(path)
    parse = cache(OverridesParser.create().parse_rule)
    OverridesParser.parse_rule = lambda _, text, rule: copy.copy(parse(text, rule))  # type: ignore[method-assign]
    _keep_groups(config_loader_impl, config_loader_impl.ConfigLoaderImpl)


def _keep_groups(module: Any, loader: Any) -> None:
    """Cache what follows from the choices of groups, where no folder but ours has any."""
    make_list, compose = module.create_defaults_list, loader._compose_config_from_defaults_list
    lists, configs = dict[Any, Any](), dict[str, bytes]()

    def ours(repo: Any) -> bool:
        return [source.path for source in repo.get_sources()] == ["hydra.conf", str(CFG), ""]

    def kept_list(repo: Any, config_name: Any, overrides_list: Any, **options: Any) -> Any:
        if config_name != "config" or options["skip_missing"] or not ours(repo):  # it is skipped in sweeps
            return make_list(repo, config_name, overrides_list, **options)
        groups = {each.key_or_group for each in overrides_list if repo.group_exists(each.key_or_group)}
        values = [each for each in overrides_list if each.key_or_group not in groups or isinstance(each.value(), dict)]
        chosen = [each for each in overrides_list if each not in values]
        key = str([each.input_line for each in chosen]), str(options)
        if key not in lists:
            lists[key] = make_list(repo, config_name, chosen, **options)
        return dataclasses.replace(lists[key], config_overrides=[*lists[key].config_overrides, *values])

    def kept_compose(self: Any, defaults: Any, repo: Any) -> Any:
        if all(default.config_path != "config" for default in defaults) or not ours(repo):
            return compose(self, defaults, repo)
        if str(defaults) not in configs:
            configs[str(defaults)] = pickle.dumps(compose(self, defaults, repo))
        return pickle.loads(configs[str(defaults)])

    module.create_defaults_list, loader._compose_config_from_defaults_list = kept_list, kept_compose
