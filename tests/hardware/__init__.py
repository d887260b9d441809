"""Read-only measurements on real devices; run by hand where there is one."""
