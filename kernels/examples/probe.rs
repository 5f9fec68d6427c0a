//! Prints this host's GPUs as this build sees them: `cargo run -p switchyard-kernels --example probe [--features
//! cuda]`.

fn main() {
    let report = switchyard_kernels::probe();
    for line in report.lines() {
        let remedy = line.remedy.map(|remedy| format!(" ({remedy})")).unwrap_or_default();
        println!("{} {}: {}{remedy}", if line.usable { "+" } else { "-" }, line.name, line.found);
    }
    match serde_json::to_string(&report) {
        Ok(json) => println!("{json}"),
        Err(error) => eprintln!("{error}"),
    }
}
