"""The pure part: metadata in, plans out. Needs numpy and scipy, never ray or torch."""

if __name__ != "ray_etc.planners":
    raise ImportError("this package is ray_etc.planners: import ray_etc.planners")
