"""Pure decisions over snapshots: no Ray, no torch, no clock."""
