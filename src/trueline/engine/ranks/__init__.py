"""The engine on several ranks: rank 0 schedules and tells, every rank computes its part."""
