"""The service on a Ray of its own, with an interpreter that finds Ray: `-m benchmarks.ray_site PORT REPLICAS SETTINGS`.

Says when it serves; each line of settings that it reads is a rolling update.
"""

import json
import sys

import ray
from ray import serve

from service.ray_serve import deployed


def main(port: int, replicas: int, settings: str) -> None:
    cpus = 2 * replicas + 2  # those that replace all, and two of the ingress
    ray.init(num_cpus=cpus, num_gpus=0, include_dashboard=False, object_store_memory=100 * 1024**2, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(deployed(json.loads(settings), replicas))
    print(f"ready: http://127.0.0.1:{port}/v1", flush=True)
    for line in sys.stdin:
        serve.run(deployed(json.loads(line), replicas))
        print("updated", flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
