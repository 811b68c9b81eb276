"""The engines that `tfdist run --on ENGINE` hands a job to; tfdist schedules nothing itself."""
