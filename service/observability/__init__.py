"""What the server shows of itself: Prometheus metrics, the live feed, and the screen of `adaptree top`."""
