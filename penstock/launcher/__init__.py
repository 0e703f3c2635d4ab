"""The whole pipeline on one machine: each service a process, watched and restarted, and a server for the bus."""
