"""Who can run a stage. Registering a kernel imports nothing; torch and SYCL are imported when one is prepared."""
