"""Where things go: cores, layout, memory and environment of every worker, as pure functions and kernel locks; no torch, no socket."""
