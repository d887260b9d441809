"""The agent on a machine of its own: a systemd that boots it, a kernel without cgroup v1."""
