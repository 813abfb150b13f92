"""`python -m benchmarks.ray_site PORT REPLICAS SETTINGS`: the service on a Ray cluster of its own.

Prints a line when it is ready. Each input line with settings is a rolling update; for null it prints a line once all
replicas run.
"""

import json
import sys

import ray
from ray import serve

from service.bench.servers import came_true
from service.ray_serve import deployed


def main(port: int, replicas: int, first_settings: str) -> None:
    """Serve until standard input ends."""
    cpus = 2 * replicas + 2  # replicas and their replacements, and two for the ingress
    ray.init(num_cpus=cpus, num_gpus=0, include_dashboard=False, object_store_memory=100 * 1024**2, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(deployed(json.loads(first_settings), replicas))
    print(f"ready: http://127.0.0.1:{port}/v1", flush=True)
    for line in sys.stdin:
        settings = json.loads(line)
        if settings is None:
            if not came_true(lambda: _running() >= replicas):
                break  # the reader sees the end of output
            print("all run", flush=True)
        else:
            serve.run(deployed(settings, replicas))
            print("updated", flush=True)
    serve.shutdown()
    ray.shutdown()


def _running() -> int:
    """Return the number of running replicas."""
    states: dict[str, int] = serve.status().applications["default"].deployments["Replica"].replica_states
    return states.get("RUNNING", 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
