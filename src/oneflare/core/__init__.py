"""What everything stands on: the experiment and its options, registries, schedules, seeds, files, plugins, noise."""
