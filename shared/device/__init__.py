"""What differs between computing on the CPU and on a GPU, behind one interface."""
