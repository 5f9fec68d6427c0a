//! Output of the checks of GPU-initiated RDMA.

use super::*;

fn report() -> ibgda::Report {
    let check = |name, state, found: &str, remedy: Option<&str>| ibgda::Check {
        name,
        state,
        found: found.to_owned(),
        remedy: remedy.map(str::to_owned),
    };
    ibgda::Report {
        checks: vec![check("mlx5 devices", ibgda::State::Present, "mlx5_0, mlx5_1", None)],
        devices: vec![
            ibgda::DeviceReport {
                name: "mlx5_0".to_owned(),
                checks: vec![
                    check("firmware", ibgda::State::Present, "28.39.1002", None),
                    check("DevX", ibgda::State::Partial, "no right", Some("CAP_NET_RAW")),
                ],
            },
            ibgda::DeviceReport {
                name: "mlx5_1".to_owned(),
                checks: vec![check("atomics", ibgda::State::Missing, "none", Some("enable"))],
            },
        ],
    }
}

#[test]
fn every_mlx5_device_has_a_group_of_its_own_as_text() {
    let text = tree(&ibgda_groups(report()));
    let expected = "\
├─ gpu-initiated rdma
│  └─ ✔ mlx5 devices       mlx5_0, mlx5_1
├─ gpu-initiated rdma: mlx5_0
│  ├─ ✔ firmware           28.39.1002
│  ├─ ! DevX               no right
│  │                        → CAP_NET_RAW
│  └─ · run on a ConnectX  not yet: tested against software only
│                           → ibgda-bring-up tests a pair of hosts as docs/how-to/ibgda-bring-up.md describes
└─ gpu-initiated rdma: mlx5_1
   ├─ · atomics            none
   │                        → enable
   └─ · run on a ConnectX  not yet: tested against software only
                            → ibgda-bring-up tests a pair of hosts as docs/how-to/ibgda-bring-up.md describes
";
    let (_, text) = text.split_once('\n').expect("a first line");
    assert_eq!(text, expected);
}

#[test]
fn every_mlx5_device_has_a_group_of_its_own_as_json() {
    let groups = serde_json::to_value(ibgda_groups(report())).expect("JSON");
    assert_eq!(groups[1]["name"], "gpu-initiated rdma: mlx5_0");
    assert_eq!(groups[1]["checks"][1]["verdict"], "warn");
    assert_eq!(groups[1]["checks"][1]["remedy"], "CAP_NET_RAW");
    assert_eq!(groups[2]["checks"][0]["verdict"], "absent");
}
