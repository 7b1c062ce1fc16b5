"""docs/kubernetes.yaml: its fields and names, and its command on two machines, as far as the network goes.

Needs  pip install kubernetes-validate  (Kubernetes' schemas, and PyYAML), and for the command root.
"""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_variables import two_machines  # noqa: F401  a fixture
from world import ENVIRONMENT, ROOT, wait_for

pytestmark = pytest.mark.slow
MANIFEST = ROOT / "docs/kubernetes.yaml"


def documents():
    yaml = pytest.importorskip("yaml", reason="pip install kubernetes-validate")
    return list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))


@pytest.mark.parametrize("version", ["1.28", "1.31", "1.37"])
def test_kubernetes_schemas_know_the_manifests_fields(version):
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for document in documents():
        validator.validate(document, version, strict=True)


def test_the_manifests_names_agree_and_its_values_are_kubernetes_words():
    """The schemas know fields and types only."""
    service, claim, job = documents()
    spec, name, selector = job["spec"], job["metadata"]["name"], service["spec"]["selector"]
    pod, failures = spec["template"]["spec"], spec["podFailurePolicy"]["rules"]
    (box,), volumes = pod["containers"], {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in box["volumeMounts"]}
    flags = dict(word.split("=") for word in box["command"] if "=" in word)
    kinds = [("v1", "Service"), ("v1", "PersistentVolumeClaim"), ("batch/v1", "Job")]
    assert [(part["apiVersion"], part["kind"]) for part in (service, claim, job)] == kinds
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert selector == {"job-name": name} and pod["subdomain"] == service["metadata"]["name"]
    assert box["command"][0] == "torchrun" and flags["--master_addr"] == f"{name}-0.{pod['subdomain']}"
    assert spec["completionMode"] == "Indexed" and flags["--node_rank"] == "$(JOB_COMPLETION_INDEX)"
    assert flags["--nnodes"] == str(spec["completions"]) == str(spec["parallelism"])
    assert flags["--nproc_per_node"] == str(box["resources"]["limits"]["nvidia.com/gpu"])
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert mounts["/runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert all(flags[flag].startswith("/runs/") for flag in ("--data-dir", "--run-dir"))
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert (pod["restartPolicy"], spec["podReplacementPolicy"]) == ("Never", "Failed")
    assert [rule["action"] for rule in failures] == ["Ignore"]
    assert [cause["type"] for cause in failures[0]["onPodConditions"]] == ["DisruptionTarget"]
    assert pod["terminationGracePeriodSeconds"] > 30  # torchrun's own limit


@pytest.mark.timeout(300)
def test_two_pods_save_when_one_is_preempted_and_the_same_command_continues(two_machines, tmp_path):  # noqa: F811
    """Each pod is a network namespace.  The GPUs, the folder /runs and the size of the training are others."""
    *_, job = documents()
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    line = " ".join([sys.executable, "-m", "torch.distributed.run", *command[1:]])
    for old, new in (
        ("_per_node=8", "_per_node=1"),
        ("/runs/", f"{tmp_path}/"),
        ("--amp", "--dataset=synthetic --width=2 --batch-size=64 --epochs=1000 --checkpoint-every=1000"),
        ("cifar10_ddp.py", str(ROOT / "cifar10_ddp.py")),
    ):
        assert old in line
        line = line.replace(old, new)
    for namespace, _, _ in two_machines:  # the DNS
        with Path("/etc/netns", namespace, "hosts").open("a") as hosts:
            hosts.write(f"{two_machines[0][2]} cifar10-0.cifar10\n")

    def run_until_a_pod_is_preempted(preempted):
        """The places in the training that pod 0 prints; that pod receives SIGTERM when it has printed the first."""
        logs, pods = [tmp_path / f"log-{index}" for index in range(2)], []
        for (namespace, _, _), log, index in zip(two_machines, logs, "01", strict=True):
            inside = ["ip", "netns", "exec", namespace, *line.replace("$(JOB_COMPLETION_INDEX)", index).split()]
            streams = {"stdout": log.open("w"), "stderr": subprocess.STDOUT}
            pods.append(subprocess.Popen(inside, cwd=tmp_path, env=ENVIRONMENT, **streams))
        try:
            wait_for(lambda: "/cifar10: epoch" in logs[0].read_text(), 100, lambda: [log.read_text() for log in logs])
            pods[preempted].send_signal(signal.SIGTERM)
            assert [pod.wait(60) for pod in pods] == [1, 1]  # torchrun's own exit code
        finally:
            for pod in pods:
                pod.kill()  # torchrun's processes end with it
        return re.findall(r"epoch \d+, batch \d+ of \d+", logs[0].read_text())

    start, saved = run_until_a_pod_is_preempted(1)
    again, saved_again = run_until_a_pod_is_preempted(0)
    assert start.startswith("epoch 1, batch 0") and saved == again and saved_again not in (start, saved)
