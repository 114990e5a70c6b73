"""Check a task with the conformance suite.

gpusim-rl check-task Ant                                 a built-in task, or one of an installed package
gpusim-rl check-task Reacher -cd my_cfg                  a task in your own folder
gpusim-rl check-task Reacher -cd my_cfg --sim mujoco     training checked on one simulator only
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    import _checkout  # noqa: F401

import argparse
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from gpusim_rl.errors import ConfigError, friendly_errors, import_optional, say
from gpusim_rl.options import Parser, listed
from gpusim_rl.settings.discover import tasks
from gpusim_rl.settings.simulators import SIMULATORS

if TYPE_CHECKING:
    from pytest import CollectReport, TestReport

MEND = {
    "yaml_sets_every_config_field_and_nothing_else": "set every Config field, and nothing else, below task:",
    "config_class_has_no_defaults": "remove the defaults of the Config class; the yaml has the values",
    "yaml_keys_reach_the_composed_settings": "start with '# @package _global_'; put the task's keys below task:",
    "class_docstring_matches_observations_and_actions": (
        "write it as in docs/add_a_task.md: '<Name>: ...', 'Action space: <n> numbers',"
        " a table 'num | name | observation | unit' per group, reward, start, termination"
    ),
    "shapes_types_and_devices": "return a float32 row per env, and a bool mask from terminated, all on self.device",
    "recipes_keep_observations_and_actions": "set actions, observations and their shapes in the task's own yaml only",
    "same_seed_repeats_and_other_seed_differs": "sample from self.random only: no torch.rand, numpy, random",
    "start_states_differ_between_envs_and_episodes": "in reset, sample each env's initial state from self.random",
    "start_states_do_not_penetrate_or_exceed_joint_limits": (
        "start higher or with less noise, and clamp the joint positions to joint_limits"
    ),
    "no_observation_element_is_constant": "remove these elements; a policy learns nothing from them",
    "sources_exist_in_the_scene": "`sources` name sensors as the scene does: 'sensor <robot>/<name>'",
    "reward_is_the_sum_of_its_terms": "return the same terms in every step, with snake_case names",
    "final_obs_equals_run_without_resets": "compute each env from its own state, whether or not other envs are reset",
    "observe_and_terminated_have_no_side_effects": "sample and write state in `advance`; these hooks run twice",
    "returned_tensors_are_never_overwritten": "return new tensors, not buffers that the next step overwrites",
    "task_state_is_tensors_written_in_place": "create tensors in __init__ and update them in place: self.x.copy_(...)",
    "restored_env_continues_bit_identically": "keep all task state in the task's own tensors",
    "diverged_env_is_reset_without_affecting_others": "compute each env from its own row: no mean or sum over envs",
    "envs_can_be_randomized": "read masses and sizes from the sim in each step, not once from the scene",
    "mirror_image_moves_like_the_original": "correct the term's kind in `mirrors`; make the default pose symmetric",
    "iteration_has_no_host_sync": "replace .item(), .cpu(), float(), 'if tensor', nonzero, x[mask] with torch.where",
    "task_trains_on_every_simulator": "use only the interface of gpusim_rl.sim; --sim selects the simulators to try",
}
"""Advice for failed checks, keyed by check name."""
LINES, WIDTH = 6, 160  # maximum size of a failure message; longer lines are tensors


def main(argv: list[str] | None = None) -> int:
    with friendly_errors():
        return check(parse(argv))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser("check-task", __doc__)
    parser.option("task", "name of the task", "Arguments")
    default = [s.name for s in SIMULATORS.values() if s.extra is None]
    settings = {"type": listed(str, SIMULATORS), "choices": None, "metavar": "A,B", "default": default}
    parser.option("--sim", "one or several", note=",".join(default), **settings)
    parser.option("--config-dir")
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> int:
    """Run the suite on one task with pytest; return the exit status."""
    from gpusim_rl.settings.hydra_errors import unknown_choice

    pytest = import_optional("pytest", "pytest>=8.2", "check-task")
    folder = None if args.config_dir is None else Path(args.config_dir).resolve()
    entries = tasks(folder)
    if args.task not in entries:
        raise unknown_choice("task", args.task, list(entries), folder)
    if problem := entries[args.task].problem:
        raise ConfigError(problem)
    if folder is not None:
        sys.path.insert(0, os.getcwd())  # import the task's modules from here, like train.py
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    report = Report(args.task)
    with tempfile.TemporaryDirectory() as scratch:
        file, settings = Path(scratch, "test_task.py"), Path(scratch, "pytest.ini")
        file.write_text(
            "from gpusim_rl.testing.conformance import TaskConformance\n"
            "class TestTask(TaskConformance):\n"
            f"    config_dir, tasks = {None if folder is None else str(folder)!r}, ({args.task!r},)\n"
            f"    simulators = {tuple(args.sim)!r}\n"
        )
        settings.write_text("[pytest]\n")  # not the current folder's settings
        options = ["-c", str(settings), "-p", "no:terminal", "-p", "no:cacheprovider"]
        pytest.main([str(file), *options, "--basetemp", str(Path(scratch, "runs"))], plugins=[report])
    return report.summarise()


class Report:
    """Pytest plugin that prints a line per check, and advice on failures."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._failed = self._passed = 0

    def pytest_runtest_logreport(self, report: TestReport) -> None:
        """Print a check's result; pytest calls this after the check's setup, call and teardown."""
        if report.when != "call" and report.passed:
            return
        check, _, case = report.location[2].rpartition(".")[2].removeprefix("test_").partition("[")
        words = check.replace("_", " ")
        if simulator := case.rstrip("]").removeprefix(self._task).strip("-"):
            words += f": {simulator}"
        if report.skipped:
            say(f"skipped  {words}")
        elif report.passed:
            self._passed += 1
            say(f"ok       {words}", *(f"         {key}: {value}" for key, value in report.user_properties if value))
        else:
            self._failed += 1
            say(f"FAILED   {words}")
            for line in _message(report).splitlines()[:LINES]:
                say(f"         {line if len(line) <= WIDTH else line[: WIDTH - 3] + '...'}")
            if check in MEND:
                say(f"         try: {MEND[check]}")
        sys.stdout.flush()

    def pytest_collectreport(self, report: CollectReport) -> None:
        """Print a collection error; pytest calls this after collecting the checks."""
        if report.failed:
            self._failed += 1
            say("FAILED   the checks could not start", *(f"         {line}" for line in _message(report).splitlines()))

    def summarise(self) -> int:
        """Print the summary line; return the exit status."""
        say(f"{self._task}: {self._passed} of {self._passed + self._failed} checks passed")
        return 1 if self._failed or not self._passed else 0


def _message(report: TestReport | CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr) if crash is None else crash.message


if __name__ == "__main__":
    sys.exit(main())
