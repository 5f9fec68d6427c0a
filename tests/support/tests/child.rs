//! Processes of this test binary.

use std::process::Stdio;

use switchyard_test_support::child;

switchyard_test_support::child_processes! {
    "echo" => echo,
    "panic" => || panic!("on purpose"),
}

fn echo() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let grandchild = child::command("none").stderr(Stdio::null()).status().expect("a process");
    println!("{} {:?}", words.join(" "), grandchild.code());
}

#[test]
fn a_process_runs_its_function_and_nothing_else() {
    let output = child::command("echo").args(["one", "two"]).output().expect("a process");
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stdout), "one two Some(2)\n");
}

#[test]
fn a_panic_is_its_exit_code() {
    let output = child::command("panic").output().expect("a process");
    assert_eq!(output.status.code(), Some(101));
    assert!(String::from_utf8_lossy(&output.stderr).contains("on purpose"));
}
