"""Rate control: controller, audit, launch gate, real processes."""
