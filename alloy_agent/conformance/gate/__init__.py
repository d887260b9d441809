"""The launch gate on real processes: pages, the interposer, the freezer, the kernel witness."""
