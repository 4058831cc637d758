"""A JSON schema for the fields of KubeRay's RayService that our manifest uses.

Fields and types are those that KubeRay's API reference (1.6) lists for RayServiceSpec,
RayClusterSpec, HeadGroupSpec, WorkerGroupSpec, AutoscalerOptions, AuthOptions and
GcsFaultToleranceOptions: https://docs.ray.io/en/master/cluster/kubernetes/references/api.html
Kubernetes' own schema checks the pods inside.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
KINDS: dict[str, Schema] = {
    "text": {"type": "string"},
    "count": {"type": "integer", "minimum": 0},
    "flag": {"type": "boolean"},
    "any": {"type": "object"},
    "list": {"type": "array"},
    "texts": {"type": "object", "additionalProperties": {"type": "string"}},
}


def fields(required: str = "", others: Schema | None = None, **names: str) -> Schema:
    """Return the schema of an object. `names`: the names of its fields, by kind."""
    known = {name: KINDS[kind] for kind, of_kind in names.items() for name in of_kind.split()}
    return {
        "type": "object",
        "properties": {**known, **(others or {})},
        "required": required.split(),
        "additionalProperties": False,
    }


CREDENTIAL = fields(text="value", any="valueFrom")
AUTOSCALER = fields(
    others={
        "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
        "version": {"enum": ["v1", "v2"]},
    },
    any="resources securityContext",
    text="image imagePullPolicy",
    count="idleTimeoutSeconds",
    list="env envFrom volumeMounts",
)
AUTH = fields(
    others={"mode": {"enum": ["disabled", "token"]}}, text="secretName", flag="enableK8sTokenAuth"
)
FAULT_TOLERANCE = fields(
    "redisAddress",
    {"redisUsername": CREDENTIAL, "redisPassword": CREDENTIAL},
    text="redisAddress externalStorageNamespace",
)
HEAD = fields(
    "template",
    any="template headService",
    flag="enableIngress",
    texts="resources labels rayStartParams",
    text="serviceType",
)
WORKERS = fields(
    "groupName template minReplicas maxReplicas",
    flag="suspend",
    text="groupName",
    count="replicas minReplicas maxReplicas idleTimeoutSeconds numOfHosts",
    texts="resources labels rayStartParams",
    any="template scaleStrategy",
)
CLUSTER = fields(
    "headGroupSpec",
    {
        "authOptions": AUTH,
        "autoscalerOptions": AUTOSCALER,
        "gcsFaultToleranceOptions": FAULT_TOLERANCE,
        "headGroupSpec": HEAD,
        "workerGroupSpecs": {"type": "array", "items": WORKERS, "minItems": 1},
    },
    flag="suspend enableInTreeAutoscaling",
    text="managedBy rayVersion",
    texts="headServiceAnnotations",
)
SPEC = fields(
    "serveConfigV2 rayClusterConfig",
    {"rayClusterConfig": CLUSTER},
    count="rayClusterDeletionDelaySeconds serviceUnhealthySecondThreshold "
    "deploymentUnhealthySecondThreshold",
    any="serveService upgradeStrategy",
    text="serveConfigV2",
    flag="excludeHeadPodFromServeSvc",
)
RAY_SERVICE = fields(
    "apiVersion kind metadata spec",
    {"apiVersion": {"const": "ray.io/v1"}, "kind": {"const": "RayService"}, "spec": SPEC},
    any="metadata",
)
