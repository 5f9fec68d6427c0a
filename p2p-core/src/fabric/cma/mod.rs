//! A fabric between the processes of one host, by copies from memory to memory.
