//! Macros for public types: names of values (`names!`) and options set one by one (`setters!`).

/// Declares the names of an enum's values, and other words that are read as one: `ALL`, `name`, `Display`, and
/// `FromStr`, whose error says which argument it was and lists the names.
macro_rules! names {
    ($type:ident, $argument:literal: $($variant:ident $(($inner:path))? = $name:literal $(| $other:literal)*),* $(,)?) => {
        impl $type {
            /// All values.
            pub const ALL: &'static [Self] = &[$($type::$variant $(($inner))?),*];

            /// The name in configurations, in reports and on the command line.
            pub const fn name(self) -> &'static str {
                match self {
                    $($type::$variant $(($inner))? => $name,)*
                }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }

        impl std::str::FromStr for $type {
            type Err = $crate::Error;

            fn from_str(s: &str) -> $crate::Result<Self> {
                match s {
                    $($name $(| $other)* => Ok($type::$variant $(($inner))?),)*
                    _ => Err($crate::Error::parameter($argument, s, [$($name),*].join(", "))),
                }
            }
        }
    };
}

pub(crate) use names;

/// Methods that set one field and give the structure back; those behind a `?` take a value or an `Option`. So a field
/// can be added without a change of what users wrote.
macro_rules! setters {
    ($type:ident $(<$life:lifetime>)? {
        $($method:ident($field:ident: $value:ty);)*
        $(? $optional:ident($given:ident: $inner:ty);)*
    }) => {
        impl $(<$life>)? $type $(<$life>)? {
            $(
                #[doc = concat!("With this [`", stringify!($field), "`](Self::", stringify!($field), ").")]
                #[must_use]
                pub fn $method(mut self, $field: $value) -> Self {
                    self.$field = $field;
                    self
                }
            )*
            $(
                #[doc = concat!("With this [`", stringify!($given), "`](Self::", stringify!($given), "), or without.")]
                #[must_use]
                pub fn $optional(mut self, $given: impl Into<Option<$inner>>) -> Self {
                    self.$given = $given.into();
                    self
                }
            )*
        }
    };
}

pub(crate) use setters;
