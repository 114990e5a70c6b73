"""Stand-in for `throughput.worker.serve` with fixed speed and no measurement.

Its spec may have `steps` (per iteration), `in_env` (seconds per iteration in `env.step`), a `diary` (file for the log
of runs), a `trunk`, and a `plan` of failures by run.
"""

import json
import os
import sys


def answer(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


spec = json.loads(sys.stdin.readline())
plan = spec.get("plan", {})
sys.stderr.write("chatter\n")
if "start" in plan:
    answer(error=plan["start"])
    sys.exit(1)
separate = "ppo.network.separate=true" in spec.get("overrides", [])
answer(ready=True, settings={"trunk": "separate" if separate else spec.get("trunk"), "pid": os.getpid()})
runs = 0
for line in sys.stdin:
    request = json.loads(line)
    if "report" in request:
        answer(memory={"resident": 5000000})
        continue
    runs += 1
    if runs == plan.get("raise_at"):
        raise MemoryError("no room")
    if runs == plan.get("kill_at"):
        os.kill(os.getpid(), 9)
    if runs == plan.get("speak_at"):
        answer(error="ValueError: bad shape")
        sys.exit(1)
    if "diary" in spec:
        with open(spec["diary"], "a") as diary:
            diary.write(spec["kind"] + " ")
    count = request["run"]
    done = {"env_steps": spec.get("steps", 100) * count, "seconds": 0.5 * count}
    if "in_env" in spec:
        done["seconds_in_env"] = spec["in_env"] * count
    answer(**done, phases={"update": 0.1 * count, "log": 0.3 * count})
