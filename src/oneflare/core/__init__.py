"""What all other rooms use: the experiment, registries, schedules, seeds, files, plugins and noise."""
