"""Speed figures. Every script checks correctness in the same run before it prints one."""
