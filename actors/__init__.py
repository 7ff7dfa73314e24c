"""What runs on the cluster: slots, ranks, generations, transports and the handover between generations."""

if __name__ != "ray_etc.actors":
    raise ImportError("this package is ray_etc.actors: import ray_etc.actors")
