"""Scripts that call ``deepspeed.initialize``, read and never executed."""
