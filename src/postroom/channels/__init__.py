"""The platforms: one file each, all behind `postroom.ports.channel`."""
