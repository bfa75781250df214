"""Workers on other hosts: an agent there, a connection to it, and a transport over connections."""
