"""The faults that expt survives, and the tests, marked `faults`, that show it."""

CASES = {
    "a rank raises": "workers.the_failing_ranks_traceback_is_the_error",
    "a worker is killed":
        "workers.worker_end_is_reported "
        "signals.a_run_whose_worker_dies_starts_again_by_itself sweeps.sweep_survives_random_kills",
    "a worker leaves with code 0": "workers.worker_end_is_reported",
    "the driver is killed":
        "workers.a_killed_driver_leaves_no_process sweeps.a_killed_sweep_goes_on_where_it_was "
        "integration/resume.a_killed_run_goes_on_to_the_same_bits",
    "Ctrl-C, once and twice": "signals.ctrl_c_stops_everything signals.a_second_signal_ends_it_now",
    "Ctrl-C in a sweep":
        "sweeps.ctrl_c_stops_a_sweep_and_says_how sweeps.ctrl_c_stops_hydras_own_launcher_too",
    "SIGTERM": "signals.a_run_that_is_asked_to_stop_saves_and_goes_on",
    "a signal while a rank waits in a collective":
        "signals.one_that_is_stuck_in_a_collective_is_ended_when_its_time_is_up "
        "signals.a_second_signal_ends_it_now",
    "a rank hangs":
        "watchdogs.hanging_rank_is_named_with_stack watchdogs.a_worker_that_hangs_alone_ends",
    "ranks with unequal data":
        "data/loading.workers_together_see_what_one_sees "
        "data/loading.a_worker_without_a_sample_still_takes_part",
    "a loss that is not finite, on one rank":
        "watchdogs.non_finite_loss_stops_all_ranks_with_details "
        "watchdogs.a_step_may_be_skipped_on_all_ranks",
    "out of GPU memory": "watchdogs.a_gpu_without_room_names_the_batch_size",
    "a checkpoint that is empty, truncated or garbage":
        "integration/resume.damaged_is_skipped runs/continuing.the_newest_whole_one_is_found",
    "a checkpoint of which a byte has flipped": "integration/resume.damaged_is_skipped",
    "killed while saving":
        "disk.a_save_that_is_killed_leaves_a_whole_checkpoint "
        "runs/checkpoint.a_save_that_fails_leaves_the_one_before",
    "a checkpoint with code in it": "runs/safetensors.forged_file_is_refused",
    "a checkpoint of another model, or number of workers":
        "integration/resume.another_experiment_is_refused "
        "integration/resume.another_number_of_workers_follows_the_same_curve",
    "no space for a checkpoint":
        "disk.failed_save_leaves_the_checkpoint_before disk.full_disk_ends_the_run",
    "no space for TensorBoard": "disk.full_disk_ends_the_run",
    "two commands in one second, or in one folder":
        "integration/run.two_runs_of_the_same_second_get_two_folders_and_two_ports "
        "bad_input.bad_input_one_message command/json.a_folder_in_use_is_told_from_a_mistake "
        "sweeps.ctrl_c_stops_a_sweep_and_says_how",
    "many runs at once; a port that is taken":
        "folders_and_ports.twenty_runs_at_once_have_twenty_ports_on_loopback "
        "folders_and_ports.what_another_launcher_left_in_the_environment_does_no_harm "
        "workers.a_killed_driver_leaves_no_process",
    "two downloads at once; one cut short":
        "folders_and_ports.of_two_runs_at_once_one_downloads "
        "data/files.a_gzip_file_cut_short_or_damaged "
        "data/files.a_file_with_too_few_or_too_many_bytes",
    "no network, no data, data lost on the way":
        "bad_input.bad_input_one_message "
        "data/fingerprint.what_runs_have_come_to_outlives_the_absence_of_their_data "
        "data/files.without_a_network_the_error_comes_at_once",
    "GPUs that are not there":
        "config/parse.each_mistake_earns_its_line sweeps.what_was_refused_is_run_once_it_can",
    "a wrong key or value":
        "bad_input.bad_input_one_message config/parse.a_mistake_is_told_without_torch "
        "config/parse.each_mistake_earns_its_line sweeps.refused_sweep_leaves_nothing",
    "a _target_ that is not a model": "bad_input.bad_input_one_message",
    "a run of a sweep fails":
        "sweeps.failures_stay_where_they_are "
        "sweeps.a_failed_run_is_tried_again_and_the_others_are_returned "
        "sweeps.fail_fast_starts_no_more",
    "a value with slashes, dots and spaces":
        "integration/run.one_event_file_holds_every_tag_at_the_right_steps",
    "what another launcher left in the environment":
        "folders_and_ports.what_another_launcher_left_in_the_environment_does_no_harm "
        "launch/workers.a_refusal_is_printed_before_torchrun_hears_of_it",
    "more than one writer":
        "integration/run.one_event_file_holds_every_tag_at_the_right_steps "
        "integration/run.torchruns_workers_share_one_run_folder",
}  # fmt: skip
"""The tests of each fault, as words of folder, file and name; those without a folder lie here."""
_WORDS = (word.partition(".") for words in CASES.values() for word in words.split())
_FILES = ((file.rpartition("/"), test) for file, _, test in _WORDS)
TESTS = {
    f"tests/{folder or 'faults'}/test_{file}.py::test_{test}" for (folder, _, file), test in _FILES
}
