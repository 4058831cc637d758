"""KubeRay's RayService as a JSON schema of our own, as far as our manifest goes.

Fields and types are those that KubeRay's API reference (1.6) lists for RayServiceSpec,
RayClusterSpec, HeadGroupSpec, WorkerGroupSpec, AutoscalerOptions, AuthOptions and
GcsFaultToleranceOptions: https://docs.ray.io/en/master/cluster/kubernetes/references/api.html
The pods inside are left to Kubernetes' own schema.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
ANY: Schema = {"type": "object"}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def fields(known: dict[str, Schema], *required: str) -> Schema:
    return {
        "type": "object",
        "properties": known,
        "required": list(required),
        "additionalProperties": False,
    }


CREDENTIAL = fields({"value": TEXT, "valueFrom": ANY})
AUTOSCALER = fields(
    {
        "resources": ANY,
        "image": TEXT,
        "imagePullPolicy": TEXT,
        "securityContext": ANY,
        "idleTimeoutSeconds": COUNT,
        "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
        "version": {"enum": ["v1", "v2"]},
        "env": {"type": "array"},
        "envFrom": {"type": "array"},
        "volumeMounts": {"type": "array"},
    }
)
AUTH = fields(
    {"mode": {"enum": ["disabled", "token"]}, "secretName": TEXT, "enableK8sTokenAuth": FLAG}
)
FAULT_TOLERANCE = fields(
    {
        "redisAddress": TEXT,
        "redisUsername": CREDENTIAL,
        "redisPassword": CREDENTIAL,
        "externalStorageNamespace": TEXT,
    },
    "redisAddress",
)
HEAD = fields(
    {
        "template": ANY,
        "headService": ANY,
        "enableIngress": FLAG,
        "resources": TEXTS,
        "labels": TEXTS,
        "rayStartParams": TEXTS,
        "serviceType": TEXT,
    },
    "template",
)
WORKERS = fields(
    {
        "suspend": FLAG,
        "groupName": TEXT,
        "replicas": COUNT,
        "minReplicas": COUNT,
        "maxReplicas": COUNT,
        "idleTimeoutSeconds": COUNT,
        "resources": TEXTS,
        "labels": TEXTS,
        "rayStartParams": TEXTS,
        "template": ANY,
        "scaleStrategy": ANY,
        "numOfHosts": COUNT,
    },
    "groupName",
    "template",
    "minReplicas",
    "maxReplicas",
)
CLUSTER = fields(
    {
        "authOptions": AUTH,
        "suspend": FLAG,
        "managedBy": TEXT,
        "autoscalerOptions": AUTOSCALER,
        "headServiceAnnotations": TEXTS,
        "enableInTreeAutoscaling": FLAG,
        "gcsFaultToleranceOptions": FAULT_TOLERANCE,
        "headGroupSpec": HEAD,
        "rayVersion": TEXT,
        "workerGroupSpecs": {"type": "array", "items": WORKERS, "minItems": 1},
    },
    "headGroupSpec",
)
SPEC = fields(
    {
        "rayClusterDeletionDelaySeconds": COUNT,
        "serviceUnhealthySecondThreshold": COUNT,
        "deploymentUnhealthySecondThreshold": COUNT,
        "serveService": ANY,
        "upgradeStrategy": ANY,
        "serveConfigV2": TEXT,
        "rayClusterConfig": CLUSTER,
        "excludeHeadPodFromServeSvc": FLAG,
    },
    "serveConfigV2",
    "rayClusterConfig",
)
RAY_SERVICE = fields(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayService"},
        "metadata": ANY,
        "spec": SPEC,
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)
