"""One model instance: schedules token ids, never text."""
