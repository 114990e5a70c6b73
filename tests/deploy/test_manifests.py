"""Manifests of deploy/ against schemas and cluster requirements; none has run on a cluster."""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from yamllint import linter
from yamllint.config import YamlLintConfig

from gpusim_rl.run.stop_signal import LONG_S
from gpusim_rl.settings.checks import check_settings
from gpusim_rl.settings.compose import compose
from helpers.commands import ROOT
from helpers.kustomize import render

OVERLAYS = ("one-node", "several-nodes", "trainjob", "ray")
JOBS = ("one-node", "several-nodes")
KUBERNETES = "1.34"
RAYJOB = json.loads(Path(__file__).with_name("rayjob.json").read_text())


def workload(overlay: str) -> dict[str, Any]:
    """Return the training object of an overlay."""
    [found] = [one for one in render(ROOT / "deploy" / "overlays" / overlay) if one["kind"].endswith("Job")]
    return found


def pod_specs(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pods of an object; for a TrainJob the runtime patches with its trainer's resources."""
    spec = job["spec"]
    if job["kind"] == "Job":
        return [spec["template"]["spec"]]
    if job["kind"] == "RayJob":
        cluster = spec["rayClusterSpec"]
        return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    [patch] = spec["runtimePatches"]
    [replicated] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = copy.deepcopy(replicated["template"]["spec"]["template"]["spec"])
    pod["containers"][0]["resources"] = spec["trainer"]["resourcesPerNode"]
    return [pod]


def learner(overlay: str) -> dict[str, Any]:
    return pod_specs(workload(overlay))[0]


def command_line(overlay: str) -> list[str]:
    spec = workload(overlay)["spec"]
    if overlay == "ray":
        return shlex.split(spec["entrypoint"])
    container = spec["trainer"] if overlay == "trainjob" else spec["template"]["spec"]["containers"][0]
    return [*container["command"], *container["args"]]


def gib(quantity: str) -> int:
    return int(quantity.removesuffix("Gi"))


def check_schema(one: dict[str, Any]) -> None:
    if one["kind"] == "TrainJob":
        from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

        model = TrainerV1alpha1TrainJob.from_dict(one)
        assert model is not None
        assert model.to_dict() == one  # unknown fields would be missing
    elif one["kind"] == "RayJob":
        jsonschema.validate(one, RAYJOB)
        for pod in pod_specs(one):
            check_schema({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod})
    else:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_objects_follow_their_schemas(overlay):
    for one in render(ROOT / "deploy" / "overlays" / overlay):
        check_schema(one)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_misspelled_field_is_found(overlay):
    job = workload(overlay)
    job["spec"]["backofLimit"] = 3
    with pytest.raises((AssertionError, jsonschema.ValidationError)):
        check_schema(job)


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kubectl_renders_same_objects(overlay):
    folder = ROOT / "deploy" / "overlays" / overlay
    output = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=True).stdout

    def by_name(objects: Any) -> dict[Any, Any]:
        return {(one["kind"], one["metadata"]["name"]): one for one in objects}

    assert by_name(yaml.safe_load_all(output)) == by_name(render(folder))


@pytest.mark.parametrize(
    "file", sorted((ROOT / "deploy").rglob("*.yaml")), ids=lambda file: f"{file.parent.name}/{file.name}"
)
def test_yaml_is_clean(file):
    rules = YamlLintConfig("{extends: default, rules: {line-length: {max: 120}, document-start: disable}}")
    assert [str(problem) for problem in linter.run(file.read_text(), rules)] == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_command_line_has_valid_settings(overlay):
    program, *words = command_line(overlay)
    assert program == "start-or-continue"
    [script] = [number for number, word in enumerate(words) if word.endswith("train.py")]
    check_settings(compose(words[script + 1 :]))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_one_process_per_gpu(overlay):
    gpus = learner(overlay)["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    if overlay == "trainjob":
        assert workload(overlay)["spec"]["trainer"]["numProcPerNode"] == gpus
    elif overlay in JOBS:
        assert f"--nproc-per-node={gpus}" in command_line(overlay)
    else:
        assert gpus == 1


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_shared_memory_fits_memory_limit(overlay):
    for pod in pod_specs(workload(overlay)):
        [container] = pod["containers"]
        [volume] = [one for one in pod["volumes"] if one["name"] == "shm"]
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert volume["emptyDir"]["medium"] == "Memory"
        assert 2 * gib(volume["emptyDir"]["sizeLimit"]) <= gib(container["resources"]["limits"]["memory"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_run_without_privileges(overlay):
    for pod in pod_specs(workload(overlay)):
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_start_fast_and_have_time_to_save_on_sigterm(overlay):
    assert learner(overlay)["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"  # no chown of large volumes
    assert learner(overlay)["terminationGracePeriodSeconds"] >= 2 * LONG_S


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_runs_and_kernels_outlive_pod(overlay):
    objects = render(ROOT / "deploy" / "overlays" / overlay)
    claims = {one["metadata"]["name"] for one in objects if "Claim" in one["kind"]}
    pod = learner(overlay)
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {one["name"]: one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"] if one["name"] != "shm"}
    assert {*volumes.values()} == claims == {"runs", "cache"}
    assert (mounts["runs"], mounts["cache"]) == ("/runs", "/cache")


@pytest.mark.parametrize("overlay", JOBS)
def test_preempted_pod_is_no_failure(overlay):
    spec = workload(overlay)["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy needs it
    assert spec["backoffLimit"] > 0
    [rule] = spec["podFailurePolicy"]["rules"]
    assert rule == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def test_pods_of_several_nodes_find_each_other():
    job, words = workload("several-nodes"), command_line("several-nodes")
    [service] = [one for one in render(ROOT / "deploy/overlays/several-nodes") if one["kind"] == "Service"]
    spec, name = job["spec"], job["metadata"]["name"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert f"--nnodes={spec['completions']}" in words and "--node-rank=$(NODE_RANK)" in words
    assert "--max-restarts=0" in words  # otherwise torchrun waits forever for a lost node
    assert not any(word.startswith("--rdzv-backend") for word in words)  # c10d also waits 16 minutes at the end
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    [port] = service["spec"]["ports"]
    assert f"--master-addr={name}-0.{service['metadata']['name']}.$(NAMESPACE).svc.cluster.local" in words
    assert f"--master-port={port['port']}" in words
    variables = {one["name"]: one for one in spec["template"]["spec"]["containers"][0]["env"]}
    assert "NAMESPACE" in variables
    index = variables["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def test_ray_cluster_ends_with_job_requires_token_and_scales():
    spec = workload("ray")["spec"]
    assert spec["shutdownAfterJobFinishes"] is True and spec["submissionMode"] == "K8sJobMode"
    assert spec["ttlSecondsAfterFinished"] > 0 and spec["activeDeadlineSeconds"] > 0 and spec["backoffLimit"] > 0
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"]["mode"] == "token"
    assert cluster["enableInTreeAutoscaling"] is True and cluster["autoscalerOptions"]["version"] == "v2"
    assert all(pod["restartPolicy"] == "Never" for pod in pod_specs(workload("ray")))  # required by autoscaler v2


def test_ray_learner_ends_before_head():
    [container] = learner("ray")["containers"]
    [word] = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (ROOT / "deploy" / word).stat().st_mode & 0o111
    assert f"deploy/{word} /usr/local/bin/" in (ROOT / "deploy" / "Dockerfile").read_text()
    assert "EXPERIMENT" in [one["name"] for one in container["env"]]  # identifies the training in the hook
    assert command_line("ray")[0] == "start-or-continue"


def test_only_actors_run_on_spot_nodes():
    cluster = workload("ray")["spec"]["rayClusterSpec"]
    [group], head = cluster["workerGroupSpecs"], cluster["headGroupSpec"]
    pod = group["template"]["spec"]
    assert group["template"]["metadata"]["labels"]["ray.io/market-type"] == "spot"
    [(label, value)] = pod["nodeSelector"].items()
    assert {"key": label, "operator": "Equal", "value": value, "effect": "NoSchedule"} in pod["tolerations"]
    assert head["rayStartParams"]["num-cpus"] == "0" and "tolerations" not in head["template"]["spec"]
    affinity = head["template"]["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert affinity["nodeSelectorTerms"] == [{"matchExpressions": [{"key": label, "operator": "DoesNotExist"}]}]


def test_each_actor_has_a_cpu():
    [group] = workload("ray")["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    cpus = int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    assert f"num_actors={group['maxReplicas'] * cpus}" in command_line("ray")


def test_ray_version_is_equal_in_cluster_and_image():
    version = workload("ray")["spec"]["rayClusterSpec"]["rayVersion"]
    [asked] = re.findall(r"^ARG RAY_VERSION=(.+)$", (ROOT / "deploy" / "Dockerfile").read_text(), re.MULTILINE)
    [low, high] = re.findall(r'"ray\[tune\]>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text())[0]
    numbers = [tuple(map(int, text.split("."))) for text in (low, version, high)]
    assert version == asked and numbers[0] <= numbers[1] < numbers[2]
    for overlay in OVERLAYS:
        images = re.findall(r"'image': '([^']+)'", str(workload(overlay)))
        assert images and all(image.endswith(f"-ray{version}") for image in images), images
