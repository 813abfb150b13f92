"""The service on a Ray of its own, with an interpreter that finds Ray: `-m benchmarks.ray_site PORT REPLICAS SETTINGS`.

Says when it serves; each line of settings that it reads is a rolling update, and null asks for a word once all run.
"""

import json
import sys

import ray
from ray import serve

from benchmarks.processes import came_true
from service.ray_serve import deployed


def main(port: int, replicas: int, first_settings: str) -> None:
    cpus = 2 * replicas + 2  # those that replace all, and two of the ingress
    ray.init(num_cpus=cpus, num_gpus=0, include_dashboard=False, object_store_memory=100 * 1024**2, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(deployed(json.loads(first_settings), replicas))
    print(f"ready: http://127.0.0.1:{port}/v1", flush=True)
    for line in sys.stdin:
        settings = json.loads(line)
        if settings is None:
            if not came_true(lambda: _running() >= replicas):
                break  # who waits for the word reads the end
            print("all run", flush=True)
        else:
            serve.run(deployed(settings, replicas))
            print("updated", flush=True)
    serve.shutdown()
    ray.shutdown()


def _running() -> int:
    """Replicas that serve."""
    states: dict[str, int] = serve.status().applications["default"].deployments["Replica"].replica_states
    return states.get("RUNNING", 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
