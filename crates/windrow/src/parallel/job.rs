//! The job of several processes, and the rank of this one.

use crate::{Error, Result};

/// A rank of a job of several processes, as its launcher describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Job {
    /// The number of this process, from 0.
    pub rank: usize,
    /// Number of processes.
    pub world: usize,
    /// The number of this process among those of its machine, from 0.
    pub local_rank: usize,
    /// Name or address of rank 0's machine.
    pub address: String,
    /// The job's port there. Ranks meet on the next one, since torchrun's own store holds this one.
    pub port: u16,
}

/// Names of the same quantity: torchrun's, Slurm's, Open MPI's.
const RANK: [&str; 3] = ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"];
const WORLD_SIZE: [&str; 3] = ["WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"];
const LOCAL_RANK: [&str; 3] = ["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"];

impl Job {
    /// A rank of a job that the caller knows of.
    pub fn new(
        rank: usize,
        world: usize,
        local_rank: usize,
        address: impl Into<String>,
        port: u16,
    ) -> Self {
        Job { rank, world, local_rank, address: address.into(), port }
    }

    /// The job that the environment describes: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`
    /// and `MASTER_PORT`, as torchrun sets them. Slurm's and Open MPI's own names serve in place of
    /// the first three; address and port must be given there as well. `None` without a rank.
    ///
    /// # Errors
    /// [`Error::Parameter`] if a variable is missing, no number or out of range.
    pub fn from_env() -> Result<Option<Self>> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    fn from_variables(get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let first = |names: [&'static str; 3]| {
            names.into_iter().find_map(|name| get(name).map(|value| (name, value)))
        };
        let Some(rank) = first(RANK) else { return Ok(None) };
        let needed = |names: [&'static str; 3]| first(names).ok_or_else(|| missing(names[0]));
        let rank = number(rank, 0..usize::MAX)?;
        let world = number(needed(WORLD_SIZE)?, 1..usize::MAX)?;
        if rank >= world {
            return Err(Error::parameter(
                "RANK",
                rank,
                format!("a number below WORLD_SIZE = {world}"),
            ));
        }
        let local_rank = number(needed(LOCAL_RANK)?, 0..world)?;
        let address =
            get("MASTER_ADDR").filter(|a| !a.is_empty()).ok_or_else(|| missing("MASTER_ADDR"))?;
        let port = get("MASTER_PORT").ok_or_else(|| missing("MASTER_PORT"))?;
        let port = number(("MASTER_PORT", port), 1..usize::from(u16::MAX))? as u16;
        Ok(Some(Job { rank, world, local_rank, address, port }))
    }

    /// The CUDA device of this process among `visible`: the one that its local rank counts to, or
    /// the only one where the launcher shows each process its own.
    pub(super) fn device(&self, visible: usize) -> Result<u32> {
        match visible {
            1 => Ok(0),
            n if self.local_rank < n => Ok(self.local_rank as u32),
            n => Err(Error::NoDevice {
                device: format!("cuda:{}", self.local_rank),
                reason: format!(
                    "local rank {} on a machine with {n} CUDA devices",
                    self.local_rank
                ),
            }),
        }
    }
}

fn number((name, value): (&'static str, String), range: std::ops::Range<usize>) -> Result<usize> {
    value.trim().parse().ok().filter(|v| range.contains(v)).ok_or_else(|| {
        Error::parameter(name, value, format!("a number from {} to {}", range.start, range.end - 1))
    })
}

fn missing(name: &'static str) -> Error {
    Error::parameter(
        name,
        "not set",
        "the variables of a job: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(variables: &[(&str, &str)]) -> Result<Option<Job>> {
        Job::from_variables(|name| {
            variables.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned())
        })
    }

    const TORCHRUN: [(&str, &str); 5] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29500"),
    ];

    #[test]
    fn launchers_describe_a_job() {
        let want = Job { rank: 3, world: 4, local_rank: 1, address: "node0".into(), port: 29500 };
        assert_eq!(job(&TORCHRUN).unwrap(), Some(want.clone()));
        for names in [
            ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
            ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
        ] {
            let mut variables = TORCHRUN;
            (0..3).for_each(|i| variables[i].0 = names[i]);
            assert_eq!(job(&variables).unwrap(), Some(want.clone()));
        }
        assert_eq!(job(&TORCHRUN[1..]).unwrap(), None);
    }

    #[test]
    fn variables_that_do_not_fit_are_named() {
        for (name, _) in &TORCHRUN[1..] {
            let without: Vec<_> = TORCHRUN.into_iter().filter(|v| v.0 != *name).collect();
            let message = job(&without).unwrap_err().to_string();
            assert!(message.contains(name) && message.contains("not set"), "{message}");
        }
        for (i, bad) in [
            (0, "4"),
            (0, "-1"),
            (0, "x"),
            (1, "0"),
            (2, "4"),
            (3, ""),
            (4, "0"),
            (4, "65535"),
            (4, "65536"),
        ] {
            let mut variables = TORCHRUN;
            variables[i].1 = bad;
            let message = job(&variables).unwrap_err().to_string();
            assert!(message.contains(variables[i].0), "{message}");
        }
    }

    #[test]
    fn a_local_rank_counts_visible_devices() {
        let job = job(&TORCHRUN).unwrap().unwrap();
        assert_eq!([1, 2, 8].map(|n| job.device(n).unwrap()), [0, 1, 1]);
        assert!(matches!(job.device(0), Err(Error::NoDevice { .. })));
    }
}
