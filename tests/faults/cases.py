"""The faults that expt survives, and the tests, marked `faults`, that show it."""

RUN, RESUME = (f"tests/integration/test_{name}.py::test_" for name in ("run", "resume"))
WORKERS, WATCHDOGS, SIGNALS, SWEEPS, DISK, PORTS, BAD_INPUT = (
    f"tests/faults/test_{name}.py::test_"
    for name in (
        "workers",
        "watchdogs",
        "signals",
        "sweeps",
        "disk",
        "folders_and_ports",
        "bad_input",
    )
)
FILES, FINGERPRINT, LOADING, CHECKPOINT, CONTINUING, CONFIG, LAUNCHER, JSON = (
    f"tests/{name}.py::test_"
    for name in (
        "data/test_files",
        "data/test_fingerprint",
        "data/test_loading",
        "runs/test_checkpoint",
        "runs/test_continuing",
        "config/test_parse",
        "launch/test_launcher",
        "command/test_json",
    )
)

CASES: dict[str, tuple[str, ...]] = {
    "a rank raises": (f"{WORKERS}the_failing_ranks_traceback_is_the_error",),
    "a worker is killed": (
        f"{WORKERS}worker_end_is_reported",
        f"{SIGNALS}a_run_whose_worker_dies_starts_again_by_itself",
        f"{SWEEPS}sweep_survives_random_kills",
    ),
    "a worker leaves with code 0": (f"{WORKERS}worker_end_is_reported",),
    "the driver is killed": (
        f"{WORKERS}a_killed_driver_leaves_no_process",
        f"{SWEEPS}a_killed_sweep_goes_on_where_it_was",
        f"{RESUME}a_killed_run_goes_on_to_the_same_bits",
    ),
    "Ctrl-C, once and twice": (
        f"{SIGNALS}ctrl_c_stops_everything",
        f"{SIGNALS}a_second_signal_ends_it_now",
    ),
    "Ctrl-C in a sweep": (
        f"{SWEEPS}ctrl_c_stops_a_sweep_and_says_how",
        f"{SWEEPS}ctrl_c_stops_hydras_own_launcher_too",
    ),
    "SIGTERM": (f"{SIGNALS}a_run_that_is_asked_to_stop_saves_and_goes_on",),
    "a signal while a rank waits in a collective": (
        f"{SIGNALS}one_that_is_stuck_in_a_collective_is_ended_when_its_time_is_up",
        f"{SIGNALS}a_second_signal_ends_it_now",
    ),
    "a rank hangs": (
        f"{WATCHDOGS}hanging_rank_is_named_with_stack",
        f"{WATCHDOGS}a_worker_that_hangs_alone_ends",
    ),
    "ranks with unequal data": (
        f"{LOADING}workers_together_see_what_one_sees",
        f"{LOADING}a_worker_without_a_sample_still_takes_part",
    ),
    "a loss that is not finite, on one rank": (
        f"{WATCHDOGS}non_finite_loss_stops_all_ranks_with_details",
        f"{WATCHDOGS}a_step_may_be_skipped_on_all_ranks",
    ),
    "out of GPU memory": (f"{WATCHDOGS}a_gpu_without_room_names_the_batch_size",),
    "a checkpoint that is empty, truncated or garbage": (
        f"{RESUME}damaged_is_skipped",
        f"{CONTINUING}the_newest_whole_one_is_found",
    ),
    "a checkpoint of which a byte has flipped": (f"{RESUME}damaged_is_skipped",),
    "killed while saving": (
        f"{DISK}a_save_that_is_killed_leaves_a_whole_checkpoint",
        f"{CHECKPOINT}a_save_that_fails_leaves_the_one_before",
    ),
    "a checkpoint with code in it": (
        "tests/runs/test_safetensors.py::test_forged_file_is_refused",
    ),
    "a checkpoint of another model, or number of workers": (
        f"{RESUME}another_experiment_is_refused",
        f"{RESUME}another_number_of_workers_follows_the_same_curve",
    ),
    "no space for a checkpoint": (
        f"{DISK}failed_save_leaves_the_checkpoint_before",
        f"{DISK}full_disk_ends_the_run",
    ),
    "no space for TensorBoard": (f"{DISK}full_disk_ends_the_run",),
    "two commands in one second, or in one folder": (
        f"{RUN}two_runs_of_the_same_second_get_two_folders_and_two_ports",
        f"{BAD_INPUT}bad_input_one_message",
        f"{JSON}a_folder_in_use_is_told_from_a_mistake",
        f"{SWEEPS}ctrl_c_stops_a_sweep_and_says_how",
    ),
    "many runs at once; a port that is taken": (
        f"{PORTS}twenty_runs_at_once_have_twenty_ports_on_loopback",
        f"{PORTS}what_another_launcher_left_in_the_environment_does_no_harm",
        f"{WORKERS}a_killed_driver_leaves_no_process",
    ),
    "two downloads at once; one cut short": (
        f"{PORTS}of_two_runs_at_once_one_downloads",
        f"{FILES}a_gzip_file_cut_short_or_damaged",
        f"{FILES}a_file_with_too_few_or_too_many_bytes",
    ),
    "no network, no data, data lost on the way": (
        f"{BAD_INPUT}bad_input_one_message",
        f"{FINGERPRINT}what_runs_have_come_to_outlives_the_absence_of_their_data",
        f"{FILES}without_a_network_the_error_comes_at_once",
    ),
    "GPUs that are not there": (
        f"{CONFIG}each_mistake_earns_its_line",
        f"{SWEEPS}what_was_refused_is_run_once_it_can",
    ),
    "a wrong key or value": (
        f"{BAD_INPUT}bad_input_one_message",
        f"{CONFIG}a_mistake_is_told_without_torch",
        f"{CONFIG}each_mistake_earns_its_line",
        f"{SWEEPS}refused_sweep_leaves_nothing",
    ),
    "a _target_ that is not a model": (f"{BAD_INPUT}bad_input_one_message",),
    "a run of a sweep fails": (
        f"{SWEEPS}failures_stay_where_they_are",
        f"{SWEEPS}a_failed_run_is_tried_again_and_the_others_are_returned",
        f"{SWEEPS}fail_fast_starts_no_more",
    ),
    "a value with slashes, dots and spaces": (
        f"{RUN}one_event_file_holds_every_tag_at_the_right_steps",
    ),
    "what another launcher left in the environment": (
        f"{PORTS}what_another_launcher_left_in_the_environment_does_no_harm",
        "tests/launch/test_workers.py::test_a_refusal_is_printed_before_torchrun_hears_of_it",
    ),
    "more than one writer": (
        f"{RUN}one_event_file_holds_every_tag_at_the_right_steps",
        f"{RUN}torchruns_workers_share_one_run_folder",
    ),
}
TESTS = {test for tests in CASES.values() for test in tests}
